"""Devices that tiers compute on."""

from __future__ import annotations

import torch

from serving.errors import ConfigError, DeviceLost, DeviceOutOfMemory
from serving.numerics.cards import find_card
from serving.numerics.devices.cpu import Cpu
from serving.numerics.devices.cuda import Cuda
from serving.numerics.devices.device import Device
from serving.numerics.devices.graphs import CaptureFailed, Graph
from serving.numerics.devices.npu import Npu, npu_present
from serving.numerics.precision import Kind

__all__ = [
    "CaptureFailed",
    "Cpu",
    "Cuda",
    "Device",
    "DeviceLost",
    "DeviceOutOfMemory",
    "Graph",
    "Npu",
    "open_device",
]

#: Tiers that promise FP32 products. On a card without them they fail unless that is accepted.
_NEED_FP32_CUBE: frozenset[Kind] = frozenset({"fp32", "layercast"})


def open_device(
    kind: str, threads: int, card: str = "ieee", *, tier: Kind = "fp32", accept_degraded: bool = False
) -> Device:
    """Set a device's switches for one tier, read them back, and hand it over.

    Switches are process-wide: a process opens one device, for one tier.

    Args:
        kind: `cpu`, `cuda`, `npu`, or `auto`: the first of npu, cuda and cpu that is there.
        threads: cores of the host that one operator may use.
        card: on a CPU, the card to rehearse: `910a`, `910b`, `310p`; `ieee` for none.
        tier: `hf32` and `tf32` switch that arithmetic on, every other kind off.
        accept_degraded: on an NPU without FP32 products, let an FP32 tier run them in FP16.

    Raises:
        ConfigError: the kind or card is unknown, the device is missing, or it cannot be made
            strict.
    """
    if kind == "auto":
        kind = _found() if card == "ieee" else "cpu"
    if kind != "cpu" and card != "ieee":
        raise ConfigError(f"a card is rehearsed on a CPU, not on {kind!r}; leave one of them out", "card")
    match kind:
        case "cpu":
            return Cpu(threads, find_card(card))
        case "cuda":
            return Cuda(threads, tf32=tier == "tf32")
        case "npu":
            fp16_cube = accept_degraded or tier not in _NEED_FP32_CUBE
            return Npu(threads, hf32=tier == "hf32", fp16_cube=fp16_cube)
    raise ConfigError(f"{kind!r} is no device; the devices are auto, cpu, cuda and npu", "device")


def _found() -> str:
    """The kind of the best device that the host has."""
    if npu_present():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"
