"""`TierModule`: a converted module, and the borders of the modules that it keeps in FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from serving.numerics.emulation import Islands
from serving.numerics.scheme import Scheme
from serving.numerics.weight_loss import WeightLoss


class TierModule:
    """A model at one precision, called with its input tensors.

    Floating point inputs are cast to the tier's dtype, integers and bools are not; floating
    point outputs come back FP32, in the structure that the model returns. No gradients.
    Made by `serving.numerics.conversion.convert`. Calls may nest on one thread.
    """

    #: Names of the modules that stay FP32 with all below them. "" is the whole model.
    kept_fp32: tuple[str, ...]
    #: What the cast does to the weights. A material loss was avoided by keeping its module;
    #: the others are served with.
    weight_losses: tuple[WeightLoss, ...]

    def __init__(
        self,
        module: nn.Module,
        scheme: Scheme,
        islands: Islands,
        *,
        kept_fp32: tuple[str, ...] = (),
        weight_losses: tuple[WeightLoss, ...] = (),
    ) -> None:
        self.module = module
        self.scheme = scheme
        self.kept_fp32 = kept_fp32
        self.weight_losses = weight_losses
        #: Where a running pass is; shared with the borders.
        self.islands = islands

    @property
    def dtype(self) -> torch.dtype:
        """Of activations outside the kept modules; FP32 for `autocast`, which lowers operators."""
        return self.scheme.dtype

    @property
    def emulated(self) -> bool:
        """Whether FP32 operators stand in for the tier's own, their operands or results rounded."""
        return self.scheme.emulated

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the model.

        Args:
            inputs: what the module's `forward` takes, in order, on the tier's device.

        Returns:
            What the module returns, floating point tensors as FP32. They are inference
            tensors: outside `torch.inference_mode` they may be read but not written to.
        """
        return self.watched(None, *inputs)

    def watched(
        self,
        watch: AbstractContextManager[object] | None,
        *inputs: torch.Tensor,
        look: Callable[[Any], None] | None = None,
    ) -> Any:
        """Run the model, and look on.

        Args:
            watch: a context that is innermost, such as a dispatch mode.
            inputs: as for a call.
            look: is shown what the module returned, before it is cast to FP32.
        """
        islands = self.islands
        outer = (islands.inside, islands.wide)
        islands.inside, islands.wide = False, {}
        try:
            with torch.inference_mode():
                result = self._forward([map_floats(tensor, self.scheme.narrow) for tensor in inputs], watch)
                if look is not None:
                    look(result)
                return map_floats(result, lambda tensor: tensor.to(torch.float32))
        finally:
            islands.inside, islands.wide = outer

    def _forward(self, inputs: list[torch.Tensor], watch: AbstractContextManager[object] | None) -> Any:
        with ExitStack() as stack:
            self.scheme.enter(stack, self.islands)
            if watch is not None:
                stack.enter_context(watch)
            return self.module(*inputs)


class KeptForward:
    """The `forward` of a module kept in FP32: casts at its borders, FP32 inside.

    A kept module within a kept module casts nothing. The 16-bit context comes back also when
    the module raises.

    Args:
        forward: the module's own.
        islands: the converted module's state.
        scheme: what the surroundings compute in.
        wide: leave the results FP32, as the output layer does.
    """

    def __init__(self, forward: Callable[..., Any], islands: Islands, scheme: Scheme, *, wide: bool) -> None:
        self._forward = forward
        self._islands = islands
        self._scheme = scheme
        self.wide = wide

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `forward` returns, cast unless `wide`."""
        islands = self._islands
        if islands.inside:
            return self._forward(*args, **kwargs)
        islands.inside = True
        try:
            result = self._run(args, kwargs)
            if not self.wide:
                islands.at_border = True
                return map_floats(result, self._scheme.narrow)
        finally:
            islands.inside = islands.at_border = False
        if self._scheme.emulated:
            map_floats(result, self._leave_wide)
        return result

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with ExitStack() as stack:
            self._scheme.enter_kept(stack)
            if not self._scheme.emulated:
                args, kwargs = map_floats((args, kwargs), lambda tensor: tensor.to(torch.float32))
            return self._forward(*args, **kwargs)

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
