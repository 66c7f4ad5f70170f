"""The precision contract: a request is answered by the tier it declared or a more precise one, or refused.

`RoutingTable` is pure and total: for any declaration it returns the tier that the operator bound to
it, or raises `BadPrecision`. What is measured can only move a request to a more precise tier: away
from one that is over its budget, or up to the reference where no other tier is known to keep within
a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from serving.config import ModelConfig, TierKind
from serving.errors import BadPrecision, quote
from serving.routing.declaration import Tolerance

#: More precise kinds have higher ranks, by what is rounded to fewer than 24 significand bits:
#: everything to 8 (BF16); everything to 11 (FP16); the results of matrix products only; all but
#: the borders and normalisations; operands of matrix products only (HF32, TF32); weights only;
#: nothing.
PRECISION_RANK: Mapping[TierKind, int] = MappingProxyType(
    {"bf16": 0, "fp16": 1, "mixed": 2, "autocast": 3, "hf32": 4, "tf32": 4, "layercast": 5, "fp32": 6}
)
#: What a tolerance counts as in metrics: its number would make a series for each caller.
TOLERANCE_LABEL = "tolerance"


@dataclass(frozen=True, slots=True)
class Decision:
    """The tier that answers, and why, as `X-Precision-Reason` says it."""

    tier: str
    reason: str
    #: The class or tier name that decided, from the configuration: safe as a metric label.
    declared: str
    #: The tier that is over its budget and would have answered.
    in_place_of: str | None = None


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """One model's decisions, made once from its configuration."""

    decisions: Mapping[str, Decision]
    default: Decision
    #: All tiers, the least precise first.
    ascending: tuple[str, ...]
    #: Tier -> those that are more precise, the least precise of them first.
    above: Mapping[str, tuple[str, ...]]
    #: The tier that others are compared with; None where the model has no FP32 tier.
    reference: str | None

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """The table of a checked configuration."""
        decisions = {tier: Decision(tier, "tier", tier) for tier in model.tiers}
        for name, rule in model.classes.items():
            decisions[name] = Decision(rule.tier, f"class={name}", name)
        name = model.default or most_precise(model)
        rank = {tier: PRECISION_RANK[model.kind(tier)] for tier in model.tiers}
        ascending = tuple(sorted(model.tiers, key=rank.__getitem__))
        return cls(
            MappingProxyType(decisions),
            Decision(decisions[name].tier, "default", "default"),
            ascending,
            MappingProxyType(
                {tier: tuple(other for other in ascending if rank[other] > rank[tier]) for tier in ascending}
            ),
            next((tier for tier in model.tiers if model.kind(tier) == "fp32"), None),
        )

    def decide(self, declared: str | None) -> Decision:
        """The tier for the name of a tier or class; the default for None.

        Raises:
            BadPrecision: the name is neither a tier nor a class of this model.
        """
        if declared is None:
            return self.default
        decision = self.decisions.get(declared)
        if decision is None:
            valid = ", ".join(self.decisions)
            raise BadPrecision(
                f"{quote(declared)} is neither a tier nor a class here; valid: {valid}, "
                "or a tolerance such as rel_l2<=1e-3"
            )
        return decision

    def decide_tolerance(self, tolerance: Tolerance, bound_of: Callable[[str, str], float]) -> Decision:
        """The cheapest tier that is known to keep within a tolerance; else the reference.

        Args:
            tolerance: as declared.
            bound_of: (tier, metric) -> what the tier's divergence does not exceed; infinity where
                too few rows were compared, or where the tier is over its budget.

        Raises:
            BadPrecision: the model has no reference to measure against.
        """
        if self.reference is None:
            raise BadPrecision("this model has no fp32 tier, so no divergence is measured; declare a tier")
        tier = next(
            (
                tier
                for tier in self.ascending
                if tier == self.reference or bound_of(tier, tolerance.metric) <= tolerance.bound
            ),
            self.reference,
        )
        return Decision(tier, "tolerance", TOLERANCE_LABEL)

    def within_budget(self, decision: Decision, may_serve: Callable[[str], bool]) -> Decision:
        """The decision itself, or the next more precise tier where its own is over its budget.

        Args:
            decision: what the declaration bound the request to.
            may_serve: whether a tier is within its budget. The reference always is.
        """
        if decision.tier == self.reference or may_serve(decision.tier):
            return decision
        for tier in self.above[decision.tier]:
            if tier == self.reference or may_serve(tier):
                return Decision(tier, "budget", decision.declared, in_place_of=decision.tier)
        return decision  # Without a reference nothing is measured, and no tier is over its budget.


def most_precise(model: ModelConfig) -> str:
    """The model's most precise tier; the first one configured among equals."""
    return max(model.tiers, key=lambda tier: PRECISION_RANK[model.kind(tier)])
