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
from serving.numerics.capability import Family
from serving.numerics.cards import IEEE, Card, CardName
from serving.numerics.devices.device import Device
from serving.numerics.devices.threads import read_threads, set_threads

_ONEDNN_OPERATORS = ("matmul", "conv", "rnn")
_FAMILIES: Mapping[CardName, Family] = {
    "ieee": "cpu-ieee",
    "910a": "cpu-910a",
    "910b": "cpu-910b",
    "310p": "cpu-310p",
}


class Cpu(Device):
    """The host's processor, with FP32 meant literally.

    Args:
        threads: cores that one operator may use; at least 1.
        card: whose arithmetic is rehearsed.

    Raises:
        ConfigError: `threads` is below 1, or a switch does not read back as set.
    """

    kind: ClassVar[str] = "cpu"

    def __init__(self, threads: int, card: Card = IEEE) -> None:
        self._switches = MappingProxyType({**_set_precision(), **set_threads(threads)})
        self._name = _processor()
        self.card = card

    @property
    def name(self) -> str:
        """The model name in /proc/cpuinfo, else what the platform says."""
        return self._name

    @property
    def family(self) -> Family:
        """The CPU as it is, or with a rehearsed card."""
        return _FAMILIES[self.card.name]

    @property
    def torch_device(self) -> torch.device:
        """`cpu`."""
        return torch.device("cpu")

    @property
    def switches(self) -> Mapping[str, str]:
        """Precision options of torch and oneDNN, and thread counts."""
        return self._switches

    def read_switches(self) -> dict[str, str]:
        """Read again."""
        return {**_read_precision(), **read_threads()}

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
    for operator in _ONEDNN_OPERATORS:
        getattr(torch.backends.mkldnn, operator).fp32_precision = "ieee"
    read = _read_precision()
    wrong = [f"{name}={value}" for name, value in read.items() if value not in ("highest", "ieee")]
    if wrong:
        raise ConfigError(f"torch does not keep to FP32: {', '.join(wrong)}")
    return read


def _read_precision() -> dict[str, str]:
    return {"float32_matmul_precision": torch.get_float32_matmul_precision()} | {
        f"mkldnn.{operator}.fp32_precision": str(getattr(torch.backends.mkldnn, operator).fp32_precision)
        for operator in _ONEDNN_OPERATORS
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
