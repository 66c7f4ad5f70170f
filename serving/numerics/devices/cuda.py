"""An NVIDIA GPU as a device.

It has not run on a GPU. Setting the switches and reading them back is tested on a CPU build of
torch, which keeps the same flags; everything else follows torch's documentation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from serving.errors import ConfigError
from serving.numerics.capability import Family, cuda_family
from serving.numerics.devices.graphs import Recorder
from serving.numerics.devices.streamed import Stream, StreamedDevice
from serving.numerics.devices.threads import read_threads, set_threads

#: Overrides every flag of torch's from outside.
_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


class Cuda(StreamedDevice):
    """The process's first visible GPU.

    Args:
        threads: cores that an operator on the host may use; at least 1.
        tf32: let matrix products and convolutions run in TF32, for a `tf32` tier.

    Raises:
        ConfigError: torch sees no GPU, the environment overrides the switches, or one does not
            read back as set.
    """

    kind: ClassVar[str] = "cuda"

    def __init__(self, threads: int, *, tf32: bool = False) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("torch sees no CUDA device; set device: cpu", "device")
        self._switches = MappingProxyType({**set_precision(tf32=tf32), **set_threads(threads)})
        self._device = torch.device("cuda", 0)
        torch.cuda.set_device(self._device)
        self._name = torch.cuda.get_device_name(self._device)
        self._family = cuda_family(torch.cuda.get_device_capability(self._device))
        self._own_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        """As `torch.cuda.get_device_name` says."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """`cuda:0`."""
        return self._device

    @property
    def switches(self) -> Mapping[str, str]:
        """Precision flags of cuBLAS and cuDNN, and thread counts of the host."""
        return self._switches

    @property
    def family(self) -> Family:
        """By compute capability."""
        return self._family

    def read_switches(self) -> dict[str, str]:
        """Read again."""
        return {**read_precision(), **read_threads()}

    def memory_bytes(self) -> Mapping[str, int]:
        """`allocated` by tensors, `reserved` by torch, `free` and `total` of the GPU."""
        free, total = torch.cuda.mem_get_info(self._device)
        return {
            "allocated": torch.cuda.memory_allocated(self._device),
            "reserved": torch.cuda.memory_reserved(self._device),
            "free": free,
            "total": total,
        }

    @property
    def _stream(self) -> Stream:
        return self._own_stream

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._own_stream):
            yield

    def _recorder(self) -> Recorder:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process never touch the GPU, and must not spoil the capture.
        context = torch.cuda.graph(graph, stream=self._own_stream, capture_error_mode="thread_local")
        return Recorder(graph, context)

    def _release_memory(self) -> None:
        torch.cuda.empty_cache()


def set_precision(*, tf32: bool) -> dict[str, str]:
    """Set every flag of torch's that can lower precision on a GPU, and read each back.

    The old flags come first: once the new ones are set alone, reading the old ones raises.

    Raises:
        ConfigError: the environment overrides them, or one reads back otherwise.
    """
    if _OVERRIDE in os.environ:
        raise ConfigError(f"{_OVERRIDE} in the environment overrides the precision of every tier; unset it")
    wanted = _flags(tf32=tf32)
    for _, owner, flag, value in wanted:
        setattr(owner, flag, value)
    read = read_precision()
    wrong = [
        f"{name}.{flag}={read[f'{name}.{flag}']}"
        for name, _, flag, value in wanted
        if read[f"{name}.{flag}"] != str(value)
    ]
    if wrong:
        raise ConfigError(f"torch does not take its precision flags: {', '.join(wrong)}")
    return read


def read_precision() -> dict[str, str]:
    """The same flags as they are.

    torch raises where an old flag and the new ones contradict each other, as when TF32 was turned
    on for convolutions alone: such a flag reads `contradictory`.
    """
    return {f"{name}.{flag}": _read(owner, flag) for name, owner, flag, _ in _flags(tf32=False)}


def _read(owner: Any, flag: str) -> str:
    try:
        return str(getattr(owner, flag))
    except RuntimeError:
        return "contradictory"


def _flags(*, tf32: bool) -> list[tuple[str, Any, str, object]]:
    """Name, owner, flag and value, in the order in which they are to be set."""
    cudnn: Any = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    precision = "tf32" if tf32 else "ieee"
    return [
        ("cudnn", cudnn, "allow_tf32", tf32),
        ("matmul", matmul, "allow_tf32", tf32),
        ("cudnn.conv", cudnn.conv, "fp32_precision", precision),
        ("cudnn.rnn", cudnn.rnn, "fp32_precision", precision),
        ("matmul", matmul, "fp32_precision", precision),
        ("matmul", matmul, "allow_fp16_reduced_precision_reduction", False),
        ("matmul", matmul, "allow_bf16_reduced_precision_reduction", False),
        ("matmul", matmul, "allow_fp16_accumulation", False),
    ]
