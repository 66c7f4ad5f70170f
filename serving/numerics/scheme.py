"""`Scheme`: by what means a tier gets its precision on a device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from serving.errors import PrecisionUnavailable
from serving.numerics.autocast import AutocastOperators, widened
from serving.numerics.cube import Cube, Operand, ThroughCube
from serving.numerics.devices.device import Device
from serving.numerics.emulation import Islands, RoundResults
from serving.numerics.kept import module_by_module
from serving.numerics.precision import PrecisionSpec
from serving.numerics.rounding import rounded


@dataclass(frozen=True, slots=True)
class Scheme:
    """The decisions that follow from a spec and a device."""

    spec: PrecisionSpec
    device_type: str
    #: FP32 operators stand in for the tier's own.
    emulated: bool
    #: 16-bit results are clamped by the emulation.
    saturates: bool
    #: What the emulation does to FP32 operands of the matrix unit.
    cube: Cube | None
    #: `layercast` weights lie in memory 16 bits wide, rather than rounded in 32.
    stores_narrow: bool

    @property
    def dtype(self) -> torch.dtype:
        """What activations are cast to, outside the kept modules."""
        return self.spec.dtype

    @property
    def reads_weights_by_module(self) -> bool:
        """Whether a module's weights must be reached through its `forward`."""
        return self.emulated or self.spec.kind not in ("fp32", "hf32", "tf32")

    @property
    def has_borders(self) -> bool:
        """Whether kept modules compute otherwise than their surroundings."""
        return self.spec.rounds_results

    def enter(self, stack: ExitStack, islands: Islands) -> None:
        """Put a forward pass under the tier's arithmetic."""
        if self.reads_weights_by_module:
            stack.enter_context(module_by_module())
        autocast = self.spec.kind == "autocast"
        if not self.emulated:
            if autocast:
                stack.enter_context(self._native_autocast(enabled=True))
        elif not self.spec.rounds_results:
            if self.cube is not None:
                stack.enter_context(ThroughCube(self.cube))
        else:
            mode = AutocastOperators if autocast else RoundResults
            dtype = self.spec.lower_dtype or self.dtype
            stack.enter_context(mode(dtype, islands, saturate=self.saturates, cube=self.cube))

    def enter_kept(self, stack: ExitStack) -> None:
        """Put a kept module under FP32, within a pass."""
        if self.spec.kind == "autocast" and not self.emulated:
            stack.enter_context(self._native_autocast(enabled=False))

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A floating point tensor as the tier's surroundings take it."""
        if not self.emulated or self.dtype is torch.float32:
            return widened(tensor.to(self.dtype))
        return rounded(tensor, self.dtype, saturate=self.saturates)

    def _native_autocast(self, *, enabled: bool) -> torch.autocast:
        # The cache holds casts of weights that require gradients, of which there are none.
        return torch.autocast(self.device_type, torch.float16, enabled=enabled, cache_enabled=False)


def scheme_of(spec: PrecisionSpec, device: Device) -> Scheme:
    """How `spec` is had on `device`.

    Raises:
        PrecisionUnavailable: the device cannot, with the reason.
    """
    capability = device.capability(spec.kind)
    if capability.status == "refused":
        raise PrecisionUnavailable(f"{device.title} cannot serve {spec.kind}: {capability.reason}")
    if spec.native and spec.rounds_results and device.card.name != "ieee":
        raise PrecisionUnavailable(
            f"torch's own {spec.kind} kernels compute as the CPU does, not as a {device.card.name}; "
            "leave out native or the card"
        )
    return Scheme(
        spec,
        device.torch_device.type,
        emulated=spec.emulated_on(device.kind, device.card),
        saturates=device.card.saturates,
        cube=_cube(spec, device),
        stores_narrow=spec.kind == "layercast" and device.kind != "cpu",
    )


def _cube(spec: PrecisionSpec, device: Device) -> Cube | None:
    operand: Operand | None = None
    if device.kind == "cpu" and device.card.fp16_cube:
        operand = "fp16"
    elif device.kind == "cpu" and spec.kind == "hf32":
        operand = "hf32"
    return None if operand is None else Cube(operand)
