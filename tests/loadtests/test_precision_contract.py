"""The check that every reply of a load test goes through."""

from __future__ import annotations

import pytest

from loadtests.precision_contract import broken_contract, rank, tiers_for
from serving.routing.policy import PRECISION_RANK

MODEL = {
    "default": "standard",
    "classes": {"critical": "fp32", "standard": "half"},
    "tiers": {"fp32": {"kind": "fp32"}, "half": {"kind": "fp16"}, "mixed": {"kind": "mixed"}},
}


def reply(tier: str, effective: str) -> dict[str, str]:
    """A reply's headers."""
    return {"X-Precision-Tier": tier, "X-Precision-Effective": effective}


@pytest.mark.parametrize(
    ("declared", "tiers"),
    [
        ("critical", {"fp32"}),
        ("fp32", {"fp32"}),
        ("mixed", {"fp32", "mixed"}),
        ("standard", {"fp32", "mixed", "half"}),
        (None, {"fp32", "mixed", "half"}),
    ],
)
def test_the_declared_tier_and_more_precise_ones_may_answer(declared: str | None, tiers: set[str]) -> None:
    """By the kinds of tiers, whatever their names."""
    assert tiers_for(MODEL, declared) == tiers


def test_an_unknown_declaration_is_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(KeyError):
        tiers_for(MODEL, "fp61")


@pytest.mark.parametrize("declared", ["critical", "fp32"])
@pytest.mark.parametrize(
    ("tier", "effective"),
    [
        ("half", "fp16-emulated"),
        ("mixed", "fp16-emulated"),
        ("fp32", "hf32"),
        ("fp32", "fp32-storage-fp16-cube"),
    ],
)
def test_a_sensitive_request_must_have_fp32_arithmetic(declared: str, tier: str, effective: str) -> None:
    """Not another tier, nor one of that name that computes less."""
    assert broken_contract(MODEL, declared, reply(tier, effective)) is not None


@pytest.mark.parametrize("declared", ["critical", "fp32", "mixed", "standard", None])
def test_fp32_may_answer_anything(declared: str | None) -> None:
    """The most precise tier."""
    assert broken_contract(MODEL, declared, reply("fp32", "fp32-ieee")) is None


def test_a_less_precise_tier_or_none_at_all_breaks_it() -> None:
    """For who is not sensitive too."""
    assert broken_contract(MODEL, "mixed", reply("half", "fp16-emulated")) == "mixed was answered by half"
    assert broken_contract(MODEL, "standard", {}) == "standard was answered by None"


def test_every_kind_of_the_configuration_has_a_rank() -> None:
    """In Halftone's own order, which this check does not import."""
    by_ours = sorted(PRECISION_RANK, key=rank, reverse=True)
    assert [PRECISION_RANK[kind] for kind in by_ours] == sorted(PRECISION_RANK.values())
