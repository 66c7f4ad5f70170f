"""Autocast emulated on a CPU: operator lists in the sense of `torch.autocast`, weights FP32.

Matrix products and convolutions round their operands and results to 16 bits, a list of operators
gives FP32 results, everything else follows type promotion. All tensors are held in FP32; those
that stand for 16-bit ones carry a mark on the tensor itself, which lives as long as the tensor
and cannot pass to another one that is given the same address.

The lists are those of `torch.autocast` on GPUs and of torch_npu. On a CPU torch's own list of
FP32 operators is shorter (softmax, exp and layer_norm run at 16 bits there).

Known gaps, beside those of `serving.numerics.emulation`:

* A cast to another tensor's dtype, ``x.to(y.dtype)``, gives FP32 also where `y` stands for a
  16-bit tensor, since its dtype reads FP32. ``x.type_as(y)`` is followed, and so is ``x.float()``.
* Two 16-bit formats at once are not told apart: only FP16 is emulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from serving.numerics.cube import ATTENTION, Cube
from serving.numerics.emulation import Islands, Rounder, unfused_attention
from serving.numerics.operands import Operands
from serving.numerics.operators import FOLLOWING, LOWERED, WIDENED, Plan, Rule, plan_of, plans, tensors_in
from serving.numerics.rounding import rounded

_MARK = "_halftone_narrow"
_CASTS = frozenset({"to", "_to_copy", "type_as"})
#: Lowered operators without a kernel of their own: their parts see lowered operands.
_IN_PARTS = frozenset(
    """
    chain_matmul einsum gru_cell linalg_matmul linalg_multi_dot lstm_cell rnn_relu_cell
    rnn_tanh_cell
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a column
)


def is_narrow(tensor: torch.Tensor) -> bool:
    """Whether an FP32 tensor stands for a 16-bit one."""
    return hasattr(tensor, _MARK)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as an FP32 tensor that stands for itself; shares memory."""
    return tensor.view_as(tensor) if is_narrow(tensor) else tensor


class AutocastOperators(TorchDispatchMode):
    """Lowers, widens or promotes every operator that runs under it.

    Args:
        dtype: what is lowered to.
        islands: inside kept modules everything is FP32.
        saturate: 16-bit results have no infinities and no NaN.
        cube: what the card's matrix unit does to FP32 operands.
    """

    def __init__(
        self, dtype: torch.dtype, islands: Islands, *, saturate: bool = False, cube: Cube | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.islands = islands
        self._rounder = Rounder(dtype, saturate=saturate)
        self._cube = cube
        self._operands = Operands(self._narrowed)

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plan = plans.get(func) or plan_of(func)
        if self.islands.inside:
            return self._wide(func, args, kwargs)
        if plan.name in LOWERED and not plan.written:
            return self._lower(plan, func, args, kwargs)
        if plan.name in WIDENED and not plan.written:
            return self._wide(func, args, kwargs)
        if plan.rule is Rule.DECOMPOSE and plan.name not in _CASTS:
            with self:
                return func.decompose(*args, **kwargs)
        if plan.name in _CASTS:
            return self._cast(func, args, kwargs)
        return self._promote(plan, func, args, kwargs)

    def _wide(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return func(*args, **kwargs) if self._cube is None else self._cube.run(self, func, args, kwargs)

    def _lower(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args = tuple(self._operands.rounded(value) for value in args)
        kwargs = {name: self._operands.rounded(value) for name, value in kwargs.items()}
        if plan.name in _IN_PARTS:
            with self:
                return func.decompose(*args, **kwargs)
        if plan.name == ATTENTION and self._cube is not None:
            result = unfused_attention(self._cube, self, self.islands, func, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        return self._mark(self._rounder.results(Rule.ALL, result, args, kwargs))

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_narrow(tensor):
            return tensor
        narrow = rounded(tensor, self._rounder.dtype, saturate=self._rounder.saturate)
        setattr(narrow, _MARK, True)
        return narrow

    def _promote(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if plan.written:
            return self._write(plan, func, args, kwargs)
        floats = [t for t in tensors_in(args, kwargs) if t.dtype is torch.float32]
        narrow = is_narrow(floats[0]) if floats and plan.name in FOLLOWING else _all_narrow(floats)
        if not narrow:
            return self._wide(func, args, kwargs)
        result = func(*args, **kwargs)
        rounder = self._rounder
        if plan.rule is Rule.MOVE or (plan.rule is Rule.MIX and rounder.representable(args, kwargs)):
            return self._mark(result)
        return self._mark(rounder.results(plan.rule, result, args, kwargs))

    def _write(self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """In-place operators and ``out=``: what is written to keeps its dtype."""
        result = func(*args, **kwargs)
        for position, name in plan.written:
            target = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tensors_in((target,), {}):
                if is_narrow(tensor):
                    self._rounder.written(tensor)
        return result

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.float32:
            return result
        tensors = [t for t in tensors_in(args, kwargs) if t.dtype is torch.float32]
        explicit = torch.float32 in (*(a for a in args if isinstance(a, torch.dtype)), kwargs.get("dtype"))
        if explicit or not tensors or not is_narrow(tensors[-1]):
            return widened(result)
        return result if is_narrow(result) else self._narrowed(result)

    def _mark(self, result: Any) -> Any:
        for tensor in tensors_in((result,), {}):
            if tensor.dtype is torch.float32:
                setattr(tensor, _MARK, True)
        return result


def _all_narrow(floats: Iterable[torch.Tensor]) -> bool:
    """Whether type promotion gives a 16-bit result: tensors without dimensions weigh less."""
    floats = list(floats)
    weighty = [tensor for tensor in floats if tensor.dim() > 0] or floats
    return bool(weighty) and all(is_narrow(tensor) for tensor in weighty)
