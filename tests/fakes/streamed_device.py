"""The CPU behind a stream and with graphs: what a GPU or NPU looks like to Halftone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serving.numerics.capability import Family
from serving.numerics.devices.graphs import Recorder
from serving.numerics.devices.streamed import Stream, StreamedDevice

#: Operators that wait for a value; which of them is seen depends on the inference mode.
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


class FakeStream:
    """Raises what it is told to when it is waited for, once."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.waits = 0

    def synchronize(self) -> None:
        """Nothing runs late here."""
        self.waits += 1
        error, self.error = self.error, None
        if error is not None:
            raise error


class Recording(TorchDispatchMode):
    """Keeps operators with their memory and calls them again, as a graph does.

    A value that is read on the host during the recording is refused, as a real capture refuses it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], Any]] = []
        self.replays = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run and keep an operator."""
        if func in _READS:
            raise RuntimeError("NPU function error: waited while capturing, error code is 107030")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Call all of them again, into the results of the first time."""
        self.replays += 1
        with torch.inference_mode():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                if isinstance(result, torch.Tensor) and again.data_ptr() != result.data_ptr():
                    result.copy_(again)


class FakeDevice(StreamedDevice):
    """The CPU behind a stream."""

    kind = "npu"
    name = "fake"
    torch_device = torch.device("cpu")
    switches: Mapping[str, str] = {"option": "strict"}
    family: Family = "npu-910b"

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.entries = 0
        self.released = 0
        self.read: dict[str, str] = dict(self.switches)
        self.recordings: list[Recording] = []

    def read_switches(self) -> dict[str, str]:
        """What a test says."""
        return self.read

    def memory_bytes(self) -> Mapping[str, int]:
        """None."""
        return {}

    @property
    def _stream(self) -> Stream:
        return self.stream

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self.entries += 1
        yield

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _release_memory(self) -> None:
        self.released += 1

    def _recorder(self) -> Recorder:
        recording = Recording()
        self.recordings.append(recording)
        return Recorder(recording, recording)
