"""What a reply says about its own precision: once in headers, once in the body's parameters."""

from __future__ import annotations

import math

from serving.divergence.comparison import Comparison
from serving.gateway.escalation import Escalation
from serving.gateway.precision import ModelPrecision
from serving.protocol.oip import JsonScalar
from serving.routing.declaration import Tolerance
from serving.routing.policy import DEGRADED, Decision

#: Parameter name -> value. The header is the name with dashes, behind `x-`.
Facts = dict[str, JsonScalar]


def headers_of(facts: Facts) -> list[tuple[str, str]]:
    """The same facts as response headers."""
    return [(f"x-{name.replace('_', '-')}", str(value)) for name, value in facts.items()]


def decision_facts(decision: Decision, effective: str) -> Facts:
    """Which tier answers, what arithmetic it runs, and why it does."""
    return {
        "precision_tier": decision.tier,
        "precision_effective": effective,
        "precision_reason": decision.reason,
    }


def escalation_facts(escalation: Escalation | None, decision: Decision) -> Facts:
    """Which rows the reference computed in the tier's place.

    A reply at less than the declared precision keeps that as its reason: the other rows are.
    """
    if escalation is None:
        return {}
    facts: Facts = {"precision_escalated_rows": escalation.rows}
    if decision.reason != DEGRADED:
        facts["precision_reason"] = f"escalated={escalation.cause}"
    return facts


def tolerance_facts(precision: ModelPrecision, tolerance: Tolerance, decision: Decision) -> Facts:
    """What a tier was measured to keep within, where a tolerance decided."""
    known = precision.standing(decision.tier)
    if decision.tier == precision.reference:
        return {"precision_measured": "no other tier is known to keep within this tolerance"}
    bound = precision.bound(decision.tier, tolerance.metric)
    return {"precision_measured": f"{tolerance.metric}<={bound:.3g}, samples={known.samples}"}


def verification_facts(comparison: Comparison) -> Facts:
    """How far this very reply is from the reference, at its worst row and output."""
    figures = {
        metric: max(
            (float(value) for value in values if not math.isnan(value)),
            default=math.nan,
        )
        for metric, values in comparison.row_figures().items()
    }
    shown = {
        "rel_l2": figures["rel_l2"],
        "max_abs": figures["max_abs"],
        # Infinity stands for rows that cannot be compared; no cosine is that.
        "cosine": 1 - figures["cosine_distance"] if math.isfinite(figures["cosine_distance"]) else math.nan,
    }
    shown = {metric: value for metric, value in shown.items() if not math.isnan(value)}
    if not shown:  # Outputs of text: a share of them differs.
        shown = {"share_1e2": figures["share_1e2"]}
    return {
        "precision_divergence": ", ".join(f"{metric}={value:.7g}" for metric, value in shown.items()),
        "precision_verdict": comparison.verdict,
    }
