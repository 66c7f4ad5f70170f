"""What GPUs and NPUs have in common: a stream, pinned copies, and failures that end a replica."""

from __future__ import annotations

import traceback
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn, Protocol

import torch

from serving.errors import DeviceLost, DeviceOutOfMemory
from serving.numerics.devices.device import Device, tensor_of
from serving.numerics.devices.failures import is_device_fault, is_out_of_memory
from serving.numerics.devices.graphs import CapturedPass, CaptureFailed, Graph, Pass, Recorder
from serving.tensors import Array

#: Of the known answer's matrices.
_SIDE = 16
_LAST_COUNT = 1 << 30
#: Passes before a capture, in which libraries choose kernels and take workspaces: what
#: `torch.cuda.make_graphed_callables` does.
_WARM_UP_PASSES = 3


class Stream(Protocol):
    """A queue of work on a device."""

    def synchronize(self) -> None:
        """Wait until the queue is empty."""


class StreamedDevice(Device):
    """A device that computes while the host goes on.

    Copies and forward passes run on one stream of the device's own, from one thread at a time.
    Current device and stream are per thread, so every entry sets them anew.

    After a failure of the device everything raises `DeviceLost`: in torch_npu's default
    task-queue mode later operators are dropped in silence and give uninitialised memory, and an
    error is raised once, to whoever asks next. So no answer leaves without a counter on the
    device that was counted on after it.
    """

    _counter: torch.Tensor | None = None
    _count = 0

    @abstractmethod
    def _entered(self) -> AbstractContextManager[object]:
        """This thread set to the device and its stream."""

    @property
    @abstractmethod
    def _stream(self) -> Stream: ...

    @abstractmethod
    def _recorder(self) -> Recorder:
        """An empty graph that records this device's stream."""

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory that the device copies from without the host's help."""
        return tensor.pin_memory()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A forward pass on the device's stream.

        Raises:
            DeviceOutOfMemory: the pass did not fit; the device goes on.
            DeviceLost: the device failed, now or before.
        """
        if self.poisoned:
            raise DeviceLost(f"{self.name} failed earlier and takes no more work")
        try:
            with self._entered():
                yield
        except Exception as error:
            self._judge(error)
            raise

    def synchronize(self) -> None:
        """Wait for the stream; errors of queued operators come out here.

        Raises:
            DeviceLost: the device failed, now or before.
        """
        with self.running():
            self._stream.synchronize()

    def to_device(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """As on the CPU, through pinned memory; work on the stream waits for the copies."""
        tensors = [tensor_of(array) for array in arrays]
        with self.running():
            # torch keeps pinned memory from reuse until the copy that reads it has finished.
            return [self._pinned(tensor).to(self.torch_device, non_blocking=True) for tensor in tensors]

    def to_host(self, tensor: torch.Tensor) -> Array:
        """As on the CPU, once all that the tensor waits for has finished."""
        with self.running():
            tensor = tensor.detach()
            if tensor.dtype is torch.bfloat16:
                tensor = tensor.float()
            host = self._pinned(torch.empty(tensor.shape, dtype=tensor.dtype))
            host.copy_(tensor, non_blocking=True)
            self._count_on()
            # Pinned memory is scarce and pooled; the caller keeps its array for as long as it likes.
            array: Array = host.numpy().copy()
            return array

    @property
    def has_graphs(self) -> bool:
        """Unless a kind of device says otherwise."""
        return True

    def capture(self, forward: Pass, inputs: Sequence[torch.Tensor]) -> Graph:
        """As `Device.capture`; the device's own stream is not the default one, as captures need it."""
        if not self.has_graphs:
            return super().capture(forward, inputs)
        with self.running():
            own = [tensor.clone() for tensor in inputs]
            counter = torch.zeros(1, dtype=torch.int32, device=self.torch_device)
            for _ in range(_WARM_UP_PASSES):
                forward(*own)
            self._stream.synchronize()
        try:
            with self._entered():
                recorder = self._recorder()
                with recorder.context:
                    outputs = forward(*own)
                    counter.add_(1)
        except Exception as error:
            self._judge_capture(error)
        with self.running():
            counter.zero_()  # Whether recording an operator also runs it is the runtime's business.
        return CapturedPass(self, recorder.recording, own, outputs, counter)

    def healthy(self) -> bool:
        """Whether the device still computes a known answer; if not, it is poisoned."""
        if self.poisoned:
            return False
        try:
            with self._entered():
                twos = torch.full((_SIDE, _SIDE), 2.0, dtype=torch.float16, device=self.torch_device)
                product = (twos @ twos).cpu()
                self._stream.synchronize()
        except Exception:
            self.poisoned = True
            return False
        self.poisoned = not bool((product == 4 * _SIDE).all())
        return not self.poisoned

    def _count_on(self) -> None:
        """Wait for the stream, and see that it did what it was last told.

        Raises:
            DeviceLost: it did not.
        """
        if self._counter is None or self._count == _LAST_COUNT:
            self._counter, self._count = torch.zeros(1, dtype=torch.int32, device=self.torch_device), 0
        self._count += 1
        self._counter.add_(1)
        host = self._pinned(torch.empty(1, dtype=torch.int32))
        # A non-blocking copy to the host returns before it has begun.
        host.copy_(self._counter, non_blocking=True)
        self._stream.synchronize()
        if int(host) != self._count:
            self.poisoned = True
            raise DeviceLost(f"{self.name} dropped work in silence and takes no more")

    def _judge(self, error: Exception) -> None:
        """Decide what an error that came out of a pass says of the device.

        Raises:
            DeviceOutOfMemory, DeviceLost: in the error's stead. Otherwise it was the model's.
        """
        if isinstance(error, (DeviceLost, DeviceOutOfMemory)):
            return
        out_of_memory = is_out_of_memory(error)
        if out_of_memory:
            # The error's frames hold what the batch had taken so far, for as long as it is handled.
            traceback.clear_frames(error.__traceback__)
            self._release_memory()
        elif is_device_fault(error):
            self.poisoned = True
        if self.poisoned or not self.healthy():
            raise DeviceLost(f"{self.name} failed and takes no more work") from error
        if out_of_memory:
            raise DeviceOutOfMemory("the batch did not fit in the device's memory") from error

    def _judge_capture(self, error: Exception) -> NoReturn:
        """Decide what an error during a capture says of the device.

        The runtime refuses in its own words what cannot be recorded, so its words prove nothing
        here; whether the device still computes does.

        Raises:
            CaptureFailed, DeviceOutOfMemory, DeviceLost: one of them.
        """
        out_of_memory = is_out_of_memory(error)
        traceback.clear_frames(error.__traceback__)
        self._release_memory()
        if not self.healthy():
            raise DeviceLost(f"{self.name} failed and takes no more work") from error
        if out_of_memory:
            raise DeviceOutOfMemory("the graph did not fit in the device's memory") from error
        raise CaptureFailed(_first_words(error)) from error

    def _release_memory(self) -> None:
        """Give cached memory back, so that the next batch finds it in one piece."""


def _first_words(error: BaseException) -> str:
    """What went wrong first, in a line: ending a spoilt capture raises again, and says less."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().partition("\n")[0] or type(error).__name__
