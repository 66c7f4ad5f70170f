"""Whether an answer keeps the contract: by the tier that was declared, or a more precise one.

Written anew, without Halftone's own routing: what checks a server must not share its mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Kinds of tiers, the most precise first.
PRECISION = (("fp32",), ("layercast",), ("hf32", "tf32"), ("autocast",), ("mixed",), ("fp16",), ("bf16",))
#: Declared by who must have FP32 arithmetic.
SENSITIVE = ("critical", "fp32")


def rank(kind: str) -> int:
    """0 is the most precise.

    Raises:
        ValueError: there is no such kind.
    """
    for number, kinds in enumerate(PRECISION):
        if kind in kinds:
            return number
    raise ValueError(f"{kind!r} is no kind of tier")


def tiers_for(model: Mapping[str, Any], declared: str | None) -> frozenset[str]:
    """The tiers that may answer a declaration.

    Args:
        model: its metadata, as `GET /v2/models/{m}` gives it.
        declared: a tier, a class, or None: the model's default.

    Raises:
        KeyError: it is neither a tier nor a class.
    """
    name = model["default"] if declared is None else declared
    least = rank(model["tiers"][model["classes"].get(name, name)]["kind"])
    return frozenset(tier for tier, facts in model["tiers"].items() if rank(facts["kind"]) <= least)


def broken_contract(model: Mapping[str, Any], declared: str | None, headers: Mapping[str, str]) -> str | None:
    """What is wrong with the reply of these headers, or None."""
    tier, effective = headers.get("X-Precision-Tier"), headers.get("X-Precision-Effective", "")
    name = "no declaration" if declared is None else declared
    if tier not in tiers_for(model, declared):
        return f"{name} was answered by {tier}"
    is_fp32 = model["tiers"][tier]["kind"] == "fp32" and effective.startswith("fp32-ieee")
    if declared in SENSITIVE and not is_fp32:
        return f"{name} was answered by {tier}, which computes {effective}"
    return None
