"""The overflow guard: which rows of a batch a tier's number format could not hold.

A row is flagged when an element of its output is NaN or infinite, or has reached the largest value
of the 16-bit format that the output was computed in: cards that saturate (Ascend 910A and 310P)
give 65504 where others give infinity, and 0 where others give NaN. That is all of `mode: output`,
and costs one pass over the outputs.

`mode: deep` watches every operator too, since a saturating activation, a softmax or a normalisation
can hide an overflow before the output. An operator overflows where its result has reached the limit
and none of its operands had: a mask's fill value overflows nothing, and what follows from an
overflow is not counted again. The cast of the inputs is such an operator. Operators that only move
values are not looked at, and the inside of a fused operator, which computes at FP32, cannot be.

All flags are computed on the device, and reach the host with the outputs: nothing waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from serving.numerics.operators import Rule, plan_of, plans, tensors_in
from serving.numerics.tier_module import TierModule

FINE, SATURATED, NONFINITE = 0, 1, 2
GuardMode = Literal["output", "deep"]
#: Kinds of tiers whose activations are 16 bits wide somewhere.
GUARDED_KINDS = frozenset({"fp16", "bf16", "mixed", "autocast"})


class Guard:
    """Flags the rows of one tier's passes."""

    def __init__(self, module: TierModule, mode: GuardMode, ignored: Sequence[bool]) -> None:
        """Make the guard.

        Args:
            module: the tier's.
            mode: see above.
            ignored: of each output, whether it may hold NaN and infinity.
        """
        self.mode = mode
        self._module = module
        self._ignored = tuple(ignored)
        dtype = module.scheme.spec.lower_dtype or module.dtype
        self._narrow_limit = float(torch.finfo(dtype).max)
        # Autocast leaves some operators at FP32, in tensors that look the same where it is
        # emulated: only the exact limit speaks of saturation there.
        self._is_exact = module.emulated and module.scheme.spec.kind == "autocast"
        #: Of the operators of a pass, in order: whether its result's first dimension is the rows.
        self._row_first: list[bool] | None = None

    def run(
        self, inputs: Sequence[torch.Tensor], by_order: Callable[[Any], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Run the tier.

        Args:
            inputs: what the module's `forward` takes, [rows, ...].
            by_order: puts what it returns into the order of the outputs.

        Returns:
            The outputs as FP32, and behind them the rows' flags: [rows], uint8.
        """
        watch = _Watch(self, inputs) if self.mode == "deep" else None
        flags: list[torch.Tensor] = []

        def look(raw: Any) -> None:
            with _disable_current_modes():
                flags.append(self._output_flags(by_order(raw), inputs))

        result = by_order(self._module.watched(watch, *inputs, look=look))
        found = flags[0]
        if watch is not None:
            found = torch.maximum(torch.maximum(found, watch.flags), self._input_flags(inputs))
        return [*result, found]

    def learn(self, batches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Find out which operators' results have the rows in front, from batches of different sizes.

        The others' rows cannot be told apart, and an overflow in them flags all.
        """
        if self.mode != "deep":
            return
        seen = []
        for inputs in batches:
            watch = _Watch(self, inputs)
            self._module.watched(watch, *inputs)
            seen.append(watch.row_first)
        same_length = len({len(one) for one in seen}) == 1
        self._row_first = [all(flags) for flags in zip(*seen, strict=True)] if same_length else []

    def is_row_first(self, position: int) -> bool:
        """Whether the first dimension of the result of a pass's n-th operator is the rows."""
        known = self._row_first
        return known is not None and position < len(known) and known[position]

    def limit(self, tensor: torch.Tensor) -> float:
        """The largest value that a tensor's elements can have."""
        if tensor.dtype is not torch.float32:
            return float(torch.finfo(tensor.dtype).max)
        islands = self._module.islands
        narrow = self._module.emulated and not islands.inside and id(tensor) not in islands.wide
        return self._narrow_limit if narrow else float(torch.finfo(torch.float32).max)

    def reached(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where a tensor has NaN, infinity, or the largest value of its format."""
        limit = self.limit(tensor)
        if self._is_exact and limit == self._narrow_limit:
            return ~torch.isfinite(tensor) | (tensor.abs() == limit)
        return ~(tensor.abs() < limit)  # A NaN is not less than anything.

    def is_within(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor on the CPU is below the limit: one pass, and no copy."""
        least, largest = torch.aminmax(tensor)
        limit = self.limit(tensor)
        return -limit < float(least) and float(largest) < limit

    def _input_flags(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """In which rows the cast of the inputs overflows. What was infinite before is no overflow."""
        rows = int(inputs[0].shape[0])
        flags = torch.zeros(rows, dtype=torch.uint8, device=inputs[0].device)
        dtype = self._module.dtype
        if dtype is torch.float32:
            return flags
        limit = float(torch.finfo(dtype).max)
        for tensor in inputs:
            if tensor.is_floating_point() and tensor.numel():
                reached = (tensor.abs() > limit) & torch.isfinite(tensor)
                flags = torch.maximum(flags, row_flags(self._module.scheme.narrow(tensor), reached))
        return flags

    def _output_flags(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = int(inputs[0].shape[0])
        flags = torch.zeros(rows, dtype=torch.uint8, device=inputs[0].device)
        for output, ignored in zip(outputs, self._ignored, strict=True):
            if output.is_floating_point() and not ignored and output.shape[:1] == (rows,) and output.numel():
                flags = torch.maximum(flags, row_flags(output, self.reached(output)))
        return flags


def row_flags(values: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
    """[rows, ...] -> [rows]: `FINE`, `SATURATED` or `NONFINITE`."""
    rows = len(values)
    saturated = reached.reshape(rows, -1).any(dim=1)
    nonfinite = (reached & ~torch.isfinite(values)).reshape(rows, -1).any(dim=1)
    return saturated.to(torch.uint8) + (saturated & nonfinite).to(torch.uint8)


class _Watch(TorchDispatchMode):
    """Flags the rows in which an operator of one pass overflows."""

    def __init__(self, guard: Guard, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guard = guard
        self._rows = int(inputs[0].shape[0])
        self.flags = torch.zeros(self._rows, dtype=torch.uint8, device=inputs[0].device)
        #: Of each result that was looked at: whether its first dimension is as long as the batch.
        self.row_first: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        plan = plans.get(func) or plan_of(func)
        if plan.rule is not Rule.MOVE:
            with _disable_current_modes():
                for tensor in tensors_in((result,), {}):
                    if tensor.is_floating_point() and tensor.dim() > 0 and tensor.numel() > 0:
                        self._look(tensor, args, kwargs)
        return result

    def _look(self, result: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        position = len(self.row_first)
        self.row_first.append(len(result) == self._rows)
        # On a CPU the answer is at hand; a device would have to be waited for.
        if result.device.type == "cpu" and self._guard.is_within(result):
            return
        reached = self._guard.reached(result)
        if self._has_constant_at_limit(result, args, kwargs):
            return
        if self._guard.is_row_first(position):
            flags = row_flags(result, reached)
            excused = self._excused(args, kwargs)
            flags = flags * (~excused).to(torch.uint8)
        else:
            whole = row_flags(result.reshape(1, -1), reached.reshape(1, -1))
            flags = whole * (~self._excused(args, kwargs).any()).to(torch.uint8)
        self.flags = torch.maximum(self.flags, flags)

    def _has_constant_at_limit(
        self, result: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        limit = self._guard.limit(result)
        return any(
            isinstance(value, (int, float)) and not abs(value) < limit and not isinstance(value, bool)
            for value in (*args, *kwargs.values())
            if not (isinstance(value, float) and math.isnan(value))
        )

    def _excused(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """[rows]: in which rows an operand had reached the limit already."""
        excused = torch.zeros(self._rows, dtype=torch.bool, device=self.flags.device)
        for tensor in tensors_in(args, kwargs):
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            reached = self._guard.reached(tensor)
            if tensor.dim() > 0 and len(tensor) == self._rows:
                excused |= reached.reshape(self._rows, -1).any(dim=1)
            else:
                excused |= reached.any()
        return excused
