"""Operators of a converted model that compute otherwise than its tier promises.

The probe measures what a tier makes of modules of our own. A model may depart from that by
itself: it casts within its `forward`, enters an autocast of its own, converts a submodule
once it runs, or computes with weights that it registered nowhere, so that no conversion saw
them. One pass over an example is therefore watched operator by operator.

Lowered: an operator's result is narrower than promised. At `fp32` and in modules kept FP32
that is any result of fewer than 32 bits; in 16-bit surroundings, one of another 16-bit format.
Widening an FP16 or BF16 tensor loses nothing and is no departure, nor is moving its values.

Widened: in 16-bit surroundings an operand is FP32, or, where the tier is emulated, it is an
FP32 tensor with values that 16 bits cannot hold. For products and convolutions the tier is then
not what it says. Other operators are often widened on purpose, such as a normalisation's mean
of squares; they are reported only.

Known gaps: control flow that the example does not take is not seen, nor are single modules of
TorchScript and exported programs; their operators are, under the model as a whole. An explicit
``x.float()`` in an emulated 16-bit tier changes nothing (see `serving.numerics.emulation`), and
so is not seen there either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from serving.errors import PrecisionUnavailable
from serving.numerics.operators import LOWERED, Plan, Rule, plan_of, plans, tensors_in
from serving.numerics.rounding import rounded
from serving.numerics.tier_module import TierModule

_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
#: A cast computes nothing: what its result goes into is looked at.
_CASTS = frozenset({"to", "_to_copy", "type_as", "copy"})
_FP32_BYTES = 4
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Departure:
    """An operator that computes otherwise than promised."""

    #: The innermost module that runs it, by name; "" is the model's own `forward`.
    module: str
    #: As torch calls it: ``aten::linear``.
    operator: str
    #: The format that it computes in: `bf16`, `fp32`.
    computes_in: str
    #: Whether the tier is not what it says with it.
    material: bool

    def __str__(self) -> str:
        where = f"module {self.module}" if self.module else "the model itself"
        return f"{where} runs {self.operator} in {self.computes_in}"


def departures(tier: TierModule, example: Sequence[torch.Tensor]) -> tuple[Departure, ...]:
    """Run the model once and list, each once, the operators that depart from the tier's promise.

    Args:
        tier: a converted model.
        example: its inputs, any number of rows, on the tier's device.
    """
    audit = _OperatorAudit(tier)
    with _named_calls(tier.module, audit.calling):
        tier.watched(audit, *example)
    return tuple(audit.found)


def name_with(effective: str, found: Sequence[Departure]) -> str:
    """The name of an arithmetic of which some of the model's modules depart: `fp32-ieee-with-bf16`."""
    formats = sorted({departure.computes_in for departure in found if departure.material})
    return "-with-".join([effective, *formats])


def admit_model(effective: str, found: Sequence[Departure], *, accept_degraded: bool = False) -> str:
    """The name to serve a converted model under.

    Args:
        effective: what the probe measured.
        found: what `departures` found.
        accept_degraded: serve it under the name that tells both.

    Raises:
        PrecisionUnavailable: operators depart and that was not accepted; the message names them.
    """
    material = [departure for departure in found if departure.material]
    if not material or accept_degraded:
        return name_with(effective, material)
    shown = "; ".join(map(str, material[:_SHOWN]))
    more = f"; and {len(material) - _SHOWN} more" if len(material) > _SHOWN else ""
    raise PrecisionUnavailable(
        f"the device computes {effective}, but the model's own code does otherwise: {shown}{more}"
    )


class _OperatorAudit(TorchDispatchMode):
    """Looks at every operator before the tier's own modes change it."""

    def __init__(self, tier: TierModule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        scheme = tier.scheme
        self._islands = tier.islands
        self._emulated = scheme.emulated
        #: What 16-bit surroundings compute in; None where FP32 is promised.
        self._narrow = scheme.spec.lower_dtype if scheme.spec.rounds_results else None
        #: Autocast promises 16 bits to products alone; emulated it lowers every operand itself.
        self._autocast = scheme.spec.kind == "autocast"
        #: FP32 results of kept modules, and what was computed from them by type promotion.
        self._wide = WeakIdKeyDictionary()
        #: id of a weight -> whether it has values that 16 bits cannot hold.
        self._wider_weights: dict[int, bool] = {}
        #: Modules that are being called, the innermost last.
        self.calling: list[str] = [""]
        self.found: dict[Departure, None] = {}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plan = plans.get(func) or plan_of(func)
        in_fp32 = self._narrow is None or self._islands.inside
        from_wide = in_fp32 or any(t in self._wide for t in tensors_in(args, kwargs))
        # Before the operator runs: it may write to its operands.
        if not from_wide and plan.rule is not Rule.MOVE and plan.name not in _CASTS:
            self._look_at_operands(plan, func, args, kwargs)
        result = func(*args, **kwargs)
        if not self._islands.at_border:
            if plan.rule is not Rule.MOVE:
                self._look_at_results(func, result, in_fp32=in_fp32)
            if from_wide and self._narrow is not None:
                self._wide.update((t, None) for t in tensors_in((result,), {}))
        return result

    def _look_at_operands(
        self, plan: Plan, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        is_product = plan.name in LOWERED
        for tensor in tensors_in(args, kwargs):
            # A tensor without dimensions counts as a number: type promotion passes over it.
            if tensor.dim() > 0 and tensor.is_floating_point() and self._is_wider(tensor, is_product):
                self._note(func, tensor.dtype, material=is_product)
                return

    def _is_wider(self, tensor: torch.Tensor, is_product: bool) -> bool:
        if tensor.dtype.itemsize < _FP32_BYTES:
            return False
        if self._autocast:
            return is_product and not self._emulated
        if not self._emulated or tensor.dtype is not torch.float32:
            return True
        if not isinstance(tensor, nn.Parameter):
            return not self._representable(tensor)
        known = self._wider_weights.get(id(tensor))
        if known is None:
            known = self._wider_weights[id(tensor)] = not self._representable(tensor)
        return known

    def _representable(self, tensor: torch.Tensor) -> bool:
        # The tier's own modes would round both.
        with _disable_current_modes():
            narrow = rounded(tensor, self._narrow or torch.float16)
            return bool(((tensor == narrow) | torch.isnan(tensor)).all())

    def _look_at_results(self, func: Any, result: Any, *, in_fp32: bool) -> None:
        for tensor in tensors_in((result,), {}):
            if not tensor.is_floating_point() or tensor.dtype.itemsize >= _FP32_BYTES:
                continue
            if in_fp32 or tensor.dtype is not self._narrow:
                self._note(func, tensor.dtype, material=True)
                return

    def _note(self, func: Any, dtype: torch.dtype, *, material: bool) -> None:
        computes_in = _FORMATS.get(dtype, str(dtype).removeprefix("torch."))
        self.found[Departure(self.calling[-1], func._schema.name, computes_in, material)] = None  # noqa: SLF001


@contextmanager
def _named_calls(module: nn.Module, calling: list[str]) -> Iterator[None]:
    """Keep the names of the modules that are being called in `calling`.

    TorchScript modules take no hooks.
    """
    handles = []
    for name, called in module.named_modules():
        if isinstance(called, torch.jit.ScriptModule):
            continue

        def enter(_called: nn.Module, _args: object, name: str = name) -> None:
            calling.append(name)

        def leave(_called: nn.Module, _args: object, _result: object) -> None:
            calling.pop()

        handles += [called.register_forward_pre_hook(enter), called.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
