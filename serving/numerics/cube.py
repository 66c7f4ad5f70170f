"""The matrix unit of a card that shortens FP32 operands, emulated.

Operands of matrix products and convolutions are rounded, products are accumulated in FP32 and
results are FP32: HF32 on a 910B, FP16 on a 910A or 310P, whose average pooling takes FP16 too.

Known gaps: the state inside a fused recurrent layer is not rounded between steps, its inputs
and weights are; a bilinear layer is not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serving.numerics.operands import Operands
from serving.numerics.operators import FIRST_ONLY, FUSED, MIXING, MOVING, Plan, plan_of, plans
from serving.numerics.rounding import rounded, shortened

Operand = Literal["fp16", "hf32"]

_WHOLE = MOVING | MIXING | FUSED | FIRST_ONLY
ATTENTION = "scaled_dot_product_attention"


class Cube:
    """Runs operators with the matrix unit's operands rounded.

    Args:
        operand: `fp16` saturates, as the cards do that cannot do better.
    """

    def __init__(self, operand: Operand) -> None:
        self.operand = operand
        self._operands = Operands(self._round)

    def run(
        self, mode: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """`func` of its arguments; composite operators one by one, through `mode` again."""
        plan = plans.get(func) or plan_of(func)
        places = self._places(plan)
        if places:
            return self._with_rounded(places, func, args, kwargs)
        if plan.name == ATTENTION:
            with mode:
                return _attention(*args, **kwargs)
        if plan.composite and plan.name not in _WHOLE:
            with mode:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def _places(self, plan: Plan) -> tuple[tuple[int, str], ...]:
        return plan.cube or (plan.pooling if self.operand == "fp16" else ())

    def _with_rounded(
        self, places: tuple[tuple[int, str], ...], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        positional, named = list(args), dict(kwargs)
        for position, name in places:
            if position < len(positional):
                positional[position] = self._operands.rounded(positional[position])
            elif name in named:
                named[name] = self._operands.rounded(named[name])
        return func(*positional, **named)

    def _round(self, tensor: torch.Tensor) -> torch.Tensor:
        return shortened(tensor) if self.operand == "hf32" else rounded(tensor, torch.float16, saturate=True)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention product by product, where fused kernels hide two.

    The parameters are those of `scaled_dot_product_attention`, which turns a mask of bools into
    one of summands before it comes here.
    """
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        summands = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = summands.masked_fill_(attn_mask.logical_not(), -torch.inf)
    operator = torch.ops.aten._scaled_dot_product_attention_math  # noqa: SLF001 - no public name
    attended: torch.Tensor = operator(query, key, value, attn_mask, *args, **kwargs)[0]
    return attended


class ThroughCube(TorchDispatchMode):
    """FP32 arithmetic on a card whose matrix unit shortens its operands."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cube = cube

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._cube.run(self, func, args, kwargs or {})
