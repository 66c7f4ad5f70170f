"""Devices that tiers compute on."""

from __future__ import annotations

from serving.errors import ConfigError
from serving.numerics.devices.cpu import Cpu
from serving.numerics.devices.device import Device

__all__ = ["Cpu", "Device", "open_device"]


def open_device(kind: str, threads: int) -> Device:
    """Set a device's switches strictly, read them back, and hand it over.

    Args:
        kind: `cpu`.
        threads: cores that one operator may use.

    Raises:
        ConfigError: the kind is not served, or the device cannot be made strict.
    """
    if kind == "cpu":
        return Cpu(threads)
    raise ConfigError(f"this version serves on the CPU only, not on {kind!r}; set device: cpu", "device")
