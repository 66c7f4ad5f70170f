"""`Device`: what a tier computes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import numpy as np
import torch

from serving.errors import ModelError
from serving.numerics.capability import Capability, Family
from serving.numerics.capability import capability as capability_of
from serving.numerics.cards import IEEE, Card
from serving.numerics.devices.graphs import CaptureFailed, Graph, Pass
from serving.numerics.precision import Kind
from serving.tensors import Array


class Device(ABC):
    """A processor with its numeric switches set strictly, and the ways in and out of it.

    Opening one sets process-wide options, so a process opens one device, before it computes.
    """

    #: `cpu`, `cuda` or `npu`.
    kind: ClassVar[str]
    #: The card that a CPU rehearses; IEEE arithmetic otherwise.
    card: Card = IEEE
    #: Set once the device has failed: whatever it returns from then on may be garbage, so the
    #: replica is finished. Never set on a CPU.
    poisoned: bool = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The processor's model, as its maker calls it."""

    @property
    def title(self) -> str:
        """The name with the card that is rehearsed, for messages."""
        return self.name if self.card is IEEE else f"{self.name} rehearsing a {self.card.name}"

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where modules and tensors are moved to."""

    @property
    @abstractmethod
    def switches(self) -> Mapping[str, str]:
        """Every option that can lower precision or change speed, as read back after setting it."""

    @abstractmethod
    def read_switches(self) -> dict[str, str]:
        """The same options as they are now: the model's own code may have changed them since."""

    @abstractmethod
    def memory_bytes(self) -> Mapping[str, int]:
        """Memory in use, by kind."""

    @property
    @abstractmethod
    def family(self) -> Family:
        """The devices whose arithmetic is this one's."""

    def capability(self, kind: Kind) -> Capability:
        """Whether the device honours a kind of tier, and if not, why."""
        return capability_of(kind, self.family)

    @property
    def saturates(self) -> bool:
        """Whether FP16 infinities become ±65504 and NaN becomes 0."""
        return self.card.saturates

    def running(self) -> AbstractContextManager[object]:
        """What a forward pass runs under, on the thread that runs it: a stream, where there are any."""
        return nullcontext()

    def synchronize(self) -> None:  # noqa: B027 - a CPU has nothing to wait for
        """Wait until what was started on the device has finished."""

    def healthy(self) -> bool:
        """Whether the device still computes a known answer. A CPU always does."""
        return not self.poisoned

    @property
    def has_graphs(self) -> bool:
        """Whether `capture` may succeed."""
        return False

    def capture(self, forward: Pass, inputs: Sequence[torch.Tensor]) -> Graph:
        """Record a forward pass, to be replayed on other inputs of the same shapes.

        The pass runs a few times first, on copies of `inputs`.

        Raises:
            CaptureFailed: the device has no graphs, or the pass is not one sequence of operators,
                as when it waits for a value on the host.
            DeviceOutOfMemory: the pass did not fit beside what is there; the device goes on.
            DeviceLost: the device failed, now or before.
        """
        raise CaptureFailed(f"{self.title} has no graphs")

    def to_device(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Arrays -> tensors on the device, of the same dtypes and shapes.

        The tensors may share memory with the arrays; a model that writes to its inputs is
        given copies by conversion to 16 bits, and at FP32 writes to the caller's batch.

        Raises:
            ModelError: an array holds Python objects, such as `BYTES`, which no model takes;
                the source's `preprocess` should have turned them into numbers.
        """
        return [tensor_of(array).to(self.torch_device) for array in arrays]

    def to_host(self, tensor: torch.Tensor) -> Array:
        """A tensor -> an array on the host, contiguous, of the same dtype and shape.

        BF16, which numpy lacks, becomes FP32.
        """
        tensor = tensor.detach().cpu()
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.float()
        array: Array = tensor.contiguous().numpy()
        return array


def tensor_of(array: Array) -> torch.Tensor:
    """An array -> a tensor on the host, sharing memory where torch can.

    Raises:
        ModelError: the array holds Python objects.
    """
    if array.dtype.hasobject:
        raise ModelError(
            "a tensor of BYTES reached the device; the model's preprocess must turn it into numbers"
        )
    # torch warns about memory that it may not write to, and knows neither negative strides
    # nor foreign byte order.
    if not array.flags.writeable or any(step < 0 for step in array.strides) or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)
