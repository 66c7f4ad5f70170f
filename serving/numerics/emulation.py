"""16-bit arithmetic on a device that has none: compute in FP32, round every result.

A card multiplies FP16 and accumulates in FP32, then rounds the result once. On a CPU without
FP16 units the same is had by keeping every tensor in FP32 but on values that the 16-bit dtype
can represent: weights and inputs are rounded beforehand, and a `TorchDispatchMode` rounds the
result of each operator that computes something. torch's own half kernels on such a CPU take
4-13 times as long as FP32.

Known gaps, where the emulation differs from tensors that are truly 16 bits wide:

* ``tensor.dtype`` reads ``torch.float32``. Code that asks ``torch.finfo(x.dtype)`` for a mask's
  fill value or an epsilon gets FP32's, and the fill value then overflows to infinity. Code that
  raises on half tensors doesn't.
* An explicit upcast inside the module (``x.float()``) does nothing, so that what follows is
  still rounded; a module that should compute in FP32 is named in `keep_fp32` instead.
* The inside of a fused operator is FP32: attention (`scaled_dot_product_attention`), a whole
  LSTM layer, softmax, normalisation, convolution with its bias. Their results are rounded.
  This is what fused 16-bit kernels do too, up to the order of summation; those for attention
  also round its weights before they meet the values, which here only cards without a fused
  kernel do (910A, 310P: torch_npu computes attention there at FP32, product by product).
* Python numbers in arithmetic (``x * 0.1``) are not rounded. torch's half kernels take most of
  them at FP32 too, and a few (``x + 0.1`` on a CPU) round them first. Where a number becomes an
  element (fill, clamp, pad, where) it is rounded.
* A kept module that writes to its input writes unrounded values, where a 16-bit tensor's
  FP32 copy would have been written to instead.
* Complex and FP64 tensors are left alone.
* Memory is FP32's.
* On a saturating card infinities that only move (a buffer's, through a view) stay what they are;
  every operator that computes, converts or brings in a constant gives finite results.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serving.numerics.cube import ATTENTION, Cube
from serving.numerics.operators import Rule, plan_of, plans, tensors_in
from serving.numerics.rounding import overlaps_itself, representable, round_in_place, rounded

_share_memory = torch._C._is_alias_of  # type: ignore[attr-defined]  # noqa: SLF001 - no public name


class Islands(threading.local):
    """Where a running forward pass is: inside a module kept in FP32, or outside.

    One per converted module; each thread sees its own state.
    """

    def __init__(self) -> None:
        self.inside = False
        #: While a kept module's results are cast on the way out.
        self.at_border = False
        #: Results of the output layer, and what was computed from them: FP32, never rounded.
        self.wide: dict[int, torch.Tensor] = {}


class Rounder:
    """Rounds what an operator wrote or returned.

    Results are rounded where they lie if the operator made them. A result that shares
    memory with an argument is a view, whose values were rounded when they were written; an
    argument that the operator wrote to (``add_``, ``out=``) is rounded after the write.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`.
        saturate: leave no infinities and no NaN.
    """

    def __init__(self, dtype: torch.dtype, *, saturate: bool = False) -> None:
        self.dtype = dtype
        self.saturate = saturate

    def representable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether all that may enter an operator's result is a value of the dtype already.

        FP32 tensors are, except those without dimensions: a constant such as
        ``torch.tensor(-1e9)``. Numbers inside lists are sizes.
        """
        for value in (*args, *kwargs.values()):
            if isinstance(value, (int, float)) and not representable(value, self.dtype, self.saturate):
                return False
        return all(
            tensor.dtype is torch.bool or (tensor.dtype is torch.float32 and tensor.dim() > 0)
            for tensor in tensors_in(args, kwargs)
        )

    def written(self, argument: Any) -> None:
        """Round an argument that was written to: a tensor, a list of them, or None."""
        for tensor in tensors_in((argument,), {}):
            if tensor.dtype is torch.float32:
                round_in_place(tensor, self.dtype, saturate=self.saturate)

    def results(self, rule: Rule, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result, or all of several, or the first of them, rounded."""
        if isinstance(result, torch.Tensor):
            return self._fresh(result, args, kwargs)
        if not isinstance(result, (tuple, list)) or not result:
            return result
        if rule is Rule.FIRST:
            return type(result)((self._fresh(result[0], args, kwargs), *result[1:]))
        return type(result)(self._fresh(part, args, kwargs) for part in result)

    def _fresh(self, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.float32:
            return result
        if any(_share_memory(result, tensor) for tensor in tensors_in(args, kwargs)):
            return result
        if not result.is_contiguous() and overlaps_itself(result):
            return rounded(result, self.dtype, saturate=self.saturate)
        round_in_place(result, self.dtype, saturate=self.saturate)
        return result


class RoundResults(TorchDispatchMode):
    """Rounds the FP32 result of every operator that runs under it.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`.
        islands: rounding pauses while `islands.inside`; tensors in `islands.wide` stay FP32 and
            so does what is computed from them, as type promotion has it.
        saturate: results have no infinities and no NaN.
        cube: what the card's matrix unit does to FP32 operands, where there are any: inside
            the kept modules and after the output layer.
    """

    def __init__(
        self, dtype: torch.dtype, islands: Islands, *, saturate: bool = False, cube: Cube | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.islands = islands
        self._rounder = Rounder(dtype, saturate=saturate)
        self._cube = cube

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        islands = self.islands
        if islands.inside:
            return self._wide(func, args, kwargs)
        if islands.wide and any(id(t) in islands.wide for t in tensors_in(args, kwargs)):
            result = self._wide(func, args, kwargs)
            islands.wide.update((id(t), t) for t in tensors_in((result,), {}))
            return result
        plan = plans.get(func) or plan_of(func)
        if plan.rule is Rule.DECOMPOSE:
            with self:
                return func.decompose(*args, **kwargs)
        if plan.name == ATTENTION and self._cube is not None:
            result = unfused_attention(self._cube, self, islands, func, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        rounder = self._rounder
        if plan.rule is Rule.MOVE or (plan.rule is Rule.MIX and rounder.representable(args, kwargs)):
            return result
        for position, name in plan.written:
            rounder.written(args[position] if position < len(args) else kwargs.get(name))
        return rounder.results(plan.rule, result, args, kwargs)

    def _wide(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operator on FP32 tensors."""
        return func(*args, **kwargs) if self._cube is None else self._cube.run(self, func, args, kwargs)


def unfused_attention(
    cube: Cube, mode: TorchDispatchMode, islands: Islands, func: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attention on a card that has no fused kernel for it, where torch widens 16-bit operands to FP32.

    Its two products go through the card's matrix unit; nothing is rounded in between.
    """
    islands.inside = True
    try:
        return cube.run(mode, func, args, kwargs)
    finally:
        islands.inside = False
