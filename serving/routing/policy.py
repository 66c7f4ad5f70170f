"""The precision contract: a request is answered by the tier it declared, or refused.

`RoutingTable.decide` is pure and total: for any declaration it returns the tier that the
operator bound to it, or raises `BadPrecision`. No path leads to a less precise tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from serving.config import ModelConfig, TierKind
from serving.errors import BadPrecision, quote

#: More precise kinds have higher ranks, by what is rounded to fewer than 24 significand bits:
#: everything to 8 (BF16); everything to 11 (FP16); the results of matrix products only; all but
#: the borders and normalisations; operands of matrix products only (HF32, TF32); weights only;
#: nothing.
PRECISION_RANK: Mapping[TierKind, int] = MappingProxyType(
    {"bf16": 0, "fp16": 1, "mixed": 2, "autocast": 3, "hf32": 4, "tf32": 4, "layercast": 5, "fp32": 6}
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The tier that answers, and why, as `X-Precision-Reason` says it."""

    tier: str
    reason: str
    #: The class or tier name that decided, from the configuration: safe as a metric label.
    declared: str


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """One model's decisions, made once from its configuration."""

    decisions: Mapping[str, Decision]
    default: Decision

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """The table of a checked configuration."""
        decisions = {tier: Decision(tier, "tier", tier) for tier in model.tiers}
        for name, rule in model.classes.items():
            decisions[name] = Decision(rule.tier, f"class={name}", name)
        name = model.default or most_precise(model)
        return cls(MappingProxyType(decisions), Decision(decisions[name].tier, "default", "default"))

    def decide(self, declared: str | None) -> Decision:
        """The tier for a declaration; the default for None.

        Raises:
            BadPrecision: the name is neither a tier nor a class of this model.
        """
        if declared is None:
            return self.default
        decision = self.decisions.get(declared)
        if decision is None:
            valid = ", ".join(self.decisions)
            raise BadPrecision(f"{quote(declared)} is neither a tier nor a class here; valid: {valid}")
        return decision


def most_precise(model: ModelConfig) -> str:
    """The model's most precise tier; the first one configured among equals."""
    return max(model.tiers, key=lambda tier: PRECISION_RANK[model.kind(tier)])
