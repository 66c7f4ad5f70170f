"""`Device`: what a tier computes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from serving.errors import ModelError
from serving.tensors import Array


class Device(ABC):
    """A processor with its numeric switches set strictly, and the ways in and out of it.

    Opening one sets process-wide options, so a process opens one device, before it computes.
    """

    #: `cpu`, and in later versions `cuda` and `npu`.
    kind: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """The processor's model, as its maker calls it."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where modules and tensors are moved to."""

    @property
    @abstractmethod
    def switches(self) -> Mapping[str, str]:
        """Every option that can lower precision or change speed, as read back after setting it."""

    @abstractmethod
    def memory_bytes(self) -> Mapping[str, int]:
        """Memory in use, by kind."""

    def to_device(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Arrays -> tensors on the device, of the same dtypes and shapes.

        The tensors may share memory with the arrays; a model that writes to its inputs is
        given copies by conversion to 16 bits, and at FP32 writes to the caller's batch.

        Raises:
            ModelError: an array holds Python objects, such as `BYTES`, which no model takes;
                the source's `preprocess` should have turned them into numbers.
        """
        return [_tensor(array).to(self.torch_device) for array in arrays]

    def to_host(self, tensor: torch.Tensor) -> Array:
        """A tensor -> an array on the host, contiguous, of the same dtype and shape.

        BF16, which numpy lacks, becomes FP32.
        """
        tensor = tensor.detach().cpu()
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.float()
        array: Array = tensor.contiguous().numpy()
        return array


def _tensor(array: Array) -> torch.Tensor:
    if array.dtype.hasobject:
        raise ModelError(
            "a tensor of BYTES reached the device; the model's preprocess must turn it into numbers"
        )
    # torch warns about memory that it may not write to, and knows neither negative strides
    # nor foreign byte order.
    if not array.flags.writeable or any(step < 0 for step in array.strides) or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)
