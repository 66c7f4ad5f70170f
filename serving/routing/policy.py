"""The precision contract: a request is answered by the tier it declared or a more precise one, or refused.

`RoutingTable` is pure and total: for any declaration it returns the tier that the operator bound to
it, or raises `BadPrecision`. What is measured can only move a request to a more precise tier: away
from one that is over its budget, or up to the reference where no other tier is known to keep within
a tolerance. The one way down is a class whose rule says `may_degrade_to`, while its own tier is full
or lost; the reply names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from serving.config import PRECISION_RANK, ModelConfig
from serving.errors import BadPrecision, quote
from serving.routing.declaration import Tolerance

#: What a tolerance counts as in metrics: its number would make a series for each caller.
TOLERANCE_LABEL = "tolerance"
#: The reason of a reply at less than its class's precision, which its class allows.
DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class Decision:
    """The tier that answers, and why, as `X-Precision-Reason` says it."""

    tier: str
    reason: str
    #: The class or tier name that decided, from the configuration: safe as a metric label.
    declared: str
    #: Cheaper tiers that would have answered, had they been measured to keep within what is asked.
    passed_over: tuple[str, ...] = ()
    #: The less precise tier that the class may have while `tier` is full or lost.
    may_degrade_to: str | None = None


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """One model's decisions, made once from its configuration."""

    decisions: Mapping[str, Decision]
    default: Decision
    #: All tiers, the least precise first.
    ascending: tuple[str, ...]
    #: Tier -> those that may answer in its place, the least precise of them first.
    above: Mapping[str, tuple[str, ...]]
    #: The tier that others are compared with; None where the model has no FP32 tier.
    reference: str | None

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """The table of a checked configuration."""
        decisions = {tier: Decision(tier, "tier", tier) for tier in model.tiers}
        for name, rule in model.classes.items():
            decisions[name] = Decision(rule.tier, f"class={name}", name, may_degrade_to=rule.may_degrade_to)
        name = model.default or most_precise(model)
        rank = {tier: PRECISION_RANK[model.kind(tier)] for tier in model.tiers}
        ascending = tuple(sorted(model.tiers, key=rank.__getitem__))
        reference = next((tier for tier in model.tiers if model.kind(tier) == "fp32"), None)
        return cls(
            MappingProxyType(decisions),
            replace(decisions[name], reason="default", declared="default"),
            ascending,
            MappingProxyType(
                {
                    # A second FP32 tier has the first one, the reference, behind it.
                    tier: tuple(
                        other
                        for other in ascending
                        if rank[other] > rank[tier] or (other == reference and other != tier)
                    )
                    for tier in ascending
                }
            ),
            reference,
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
            raise BadPrecision(f"{quote(declared)} is neither a tier nor a class here; valid: {self.valid}")
        return decision

    @property
    def valid(self) -> str:
        """What a request may declare, for messages."""
        return f"{', '.join(self.decisions)}, or a tolerance such as rel_l2<=1e-3"

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
        passed_over = self.ascending[: self.ascending.index(tier)]
        return Decision(tier, "tolerance", TOLERANCE_LABEL, passed_over)

    def degraded(self, decision: Decision, may_serve: Callable[[str], bool]) -> Decision | None:
        """The less precise tier's decision, for a request whose own tier is full or lost.

        None where its class has none, where that one is over its budget, or where the request
        has left its own tier for a more precise one already.
        """
        tier = decision.may_degrade_to
        if tier is None or not may_serve(tier):
            return None
        return Decision(tier, DEGRADED, decision.declared)

    def within_budget(self, decision: Decision, may_serve: Callable[[str], bool]) -> Decision:
        """The decision itself, or the next more precise tier where its own is over its budget.

        Args:
            decision: what the declaration bound the request to.
            may_serve: whether a tier is within its budget. The reference always is.
        """
        passed_over: list[str] = []
        for tier in (decision.tier, *self.above[decision.tier]):
            if tier == self.reference or may_serve(tier):
                break
            passed_over.append(tier)
        else:
            return decision  # Without a reference nothing is measured, and no tier is over its budget.
        if not passed_over:
            return decision
        return Decision(tier, "budget", decision.declared, tuple(passed_over))


def most_precise(model: ModelConfig) -> str:
    """The model's most precise tier; the first one configured among equals."""
    return max(model.tiers, key=lambda tier: PRECISION_RANK[model.kind(tier)])
