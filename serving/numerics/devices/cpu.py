"""The CPU as a device."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch

from serving.errors import ConfigError
from serving.numerics.devices.device import Device


class Cpu(Device):
    """The host's processor, with FP32 meant literally.

    Args:
        threads: cores that one operator may use; at least 1.

    Raises:
        ConfigError: `threads` is below 1, or a switch does not read back as set.
    """

    kind: ClassVar[str] = "cpu"

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ConfigError(f"a tier needs at least 1 thread, not {threads}", "threads")
        self._switches = MappingProxyType({**_set_precision(), **_set_threads(threads)})
        self._name = _processor()

    @property
    def name(self) -> str:
        """The model name in /proc/cpuinfo, else what the platform says."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """`cpu`."""
        return torch.device("cpu")

    @property
    def switches(self) -> Mapping[str, str]:
        """Precision options of torch and oneDNN, and thread counts."""
        return self._switches

    def memory_bytes(self) -> Mapping[str, int]:
        """`rss`: resident memory of this process; empty where the system has no /proc."""
        try:
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        except (OSError, IndexError, ValueError):
            return {}
        return {"rss": pages * os.sysconf("SC_PAGE_SIZE")}


def _set_precision() -> dict[str, str]:
    """Forbid oneDNN to compute FP32 operators in BF16 or TF32, and read every switch back.

    The operators are set one by one: in torch 2.13.0 the setter of
    `torch.backends.mkldnn.fp32_precision` writes to the generic backend, not to oneDNN.
    """
    torch.set_float32_matmul_precision("highest")
    operators = ("matmul", "conv", "rnn")
    for operator in operators:
        getattr(torch.backends.mkldnn, operator).fp32_precision = "ieee"
    read = {"float32_matmul_precision": torch.get_float32_matmul_precision()} | {
        f"mkldnn.{operator}.fp32_precision": str(getattr(torch.backends.mkldnn, operator).fp32_precision)
        for operator in operators
    }
    wrong = [f"{name}={value}" for name, value in read.items() if value not in ("highest", "ieee")]
    if wrong:
        raise ConfigError(f"torch does not keep to FP32: {', '.join(wrong)}")
    return read


def _set_threads(threads: int) -> dict[str, str]:
    torch.set_num_threads(threads)
    # torch refuses a change once operators have run side by side; what is read back counts.
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError as error:
            if "set number of interop threads" not in str(error):
                raise
    return {
        "num_threads": str(torch.get_num_threads()),
        "num_interop_threads": str(torch.get_num_interop_threads()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        field, _, value = line.partition(":")
        if field.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"
