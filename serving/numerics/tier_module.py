"""`TierModule`: a converted module, and the borders of the modules that it keeps in FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from serving.numerics.emulation import Islands, RoundResults
from serving.numerics.kept import module_by_module
from serving.numerics.rounding import rounded
from serving.numerics.weight_loss import WeightLoss


class TierModule:
    """A model at one precision, called with its input tensors.

    Floating point inputs are cast to the tier's dtype, integers and bools are not; floating
    point outputs come back FP32, in the structure that the model returns. No gradients.
    Made by `serving.numerics.conversion.convert`. Calls may nest on one thread.
    """

    #: Arithmetic outside the kept modules.
    dtype: torch.dtype
    #: Whether 16-bit arithmetic is emulated: FP32 computed, every result rounded.
    emulated: bool
    #: Names of the modules that stay FP32 with all below them. "" is the whole model.
    kept_fp32: tuple[str, ...]
    #: What the cast does to the weights. A material loss was avoided by keeping its module;
    #: the others are served with.
    weight_losses: tuple[WeightLoss, ...]

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype,
        emulated: bool,
        islands: Islands,
        kept_fp32: tuple[str, ...] = (),
        weight_losses: tuple[WeightLoss, ...] = (),
    ) -> None:
        self.module = module
        self.dtype = dtype
        self.emulated = emulated
        self.kept_fp32 = kept_fp32
        self.weight_losses = weight_losses
        #: Where a running pass is; shared with the borders.
        self.islands = islands

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the model.

        Args:
            inputs: what the module's `forward` takes, in order, on the tier's device.

        Returns:
            What the module returns, floating point tensors as FP32. They are inference
            tensors: outside `torch.inference_mode` they may be read but not written to.
        """
        islands = self.islands
        outer = (islands.inside, islands.wide)
        islands.inside, islands.wide = False, {}
        try:
            with torch.inference_mode():
                result = self._forward([self._narrow(tensor) for tensor in inputs])
                return map_floats(result, lambda tensor: tensor.to(torch.float32))
        finally:
            islands.inside, islands.wide = outer

    def _forward(self, inputs: list[torch.Tensor]) -> Any:
        with ExitStack() as stack:
            if self.dtype is not torch.float32:
                stack.enter_context(module_by_module())
            if self.emulated:
                stack.enter_context(RoundResults(self.dtype, self.islands))
            return self.module(*inputs)

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return rounded(tensor, self.dtype) if self.emulated else tensor.to(self.dtype)


class KeptForward:
    """The `forward` of a module kept in FP32: casts at its borders, FP32 inside.

    A kept module within a kept module casts nothing. The 16-bit context comes back also when
    the module raises.

    Args:
        forward: the module's own.
        islands: the converted module's state.
        dtype: what the surroundings compute in.
        emulated: whether they are emulated.
        wide: leave the results FP32, as the output layer does.
    """

    def __init__(
        self, forward: Callable[..., Any], islands: Islands, *, dtype: torch.dtype, emulated: bool, wide: bool
    ) -> None:
        self._forward = forward
        self._islands = islands
        self._dtype = dtype
        self._emulated = emulated
        self.wide = wide

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `forward` returns, cast unless `wide`."""
        islands = self._islands
        if islands.inside:
            return self._forward(*args, **kwargs)
        islands.inside = True
        try:
            if not self._emulated:
                args, kwargs = map_floats((args, kwargs), lambda tensor: tensor.to(torch.float32))
            result = self._forward(*args, **kwargs)
            if not self.wide:
                return map_floats(result, self._narrow)
        finally:
            islands.inside = False
        if self._emulated:
            map_floats(result, self._leave_wide)
        return result

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return rounded(tensor, self._dtype) if self._emulated else tensor.to(self._dtype)

    def _leave_wide(self, tensor: torch.Tensor) -> torch.Tensor:
        self._islands.wide[id(tensor)] = tensor
        return tensor


def map_floats(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`change` applied to every floating point tensor in nested tuples, lists and mappings.

    Whatever else `value` holds is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_floats(part, change) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_floats(part, change) for part in value)
    if isinstance(value, Mapping):
        return {key: map_floats(part, change) for key, part in value.items()}
    return value
