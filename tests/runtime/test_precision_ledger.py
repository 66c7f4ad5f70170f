"""The hub's ledger: every gateway's figures counted once, and what survives a hub."""

import math
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.config import ModelConfig
from serving.divergence.standing import Standing
from serving.gateway.figures import Parcel
from serving.gateway.precision_record import ModelFigures
from serving.runtime.precision_ledger import PrecisionLedger

GOOD, BAD = 1e-4, 1.0


def model(name: str = "m", **fields: Any) -> ModelConfig:
    """Two tiers, and a budget that ten rows decide."""
    divergence = {"min_samples": 10, "window": 100, "budget": 1e-2, "cooldown_s": 0.0}
    return ModelConfig.model_validate(
        {"name": name, "source": "a:b", "tiers": {"fp32": {}, "fp16": {}}, "divergence": divergence, **fields}
    )


def parcel(number: int, *figures: float, tier: str = "fp16", name: str = "m") -> Parcel:
    """Rows of one tier."""
    return Parcel(number, {name: ModelFigures({tier: {"rel_l2": figures}}, {"rel_l2": (1e-7,)})})


def samples(ledger: PrecisionLedger) -> dict[tuple[str, str], float]:
    """The gauges: name and state."""
    page = generate_latest(ledger.registry).decode()
    return {
        (sample.name, sample.labels.get("state", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_the_window_is_the_model_s_and_not_a_gateway_s() -> None:
    """Five rows of each of two gateways make ten."""
    ledger = PrecisionLedger([model()])
    ledger.add("one", [parcel(1, *[BAD] * 5)])
    assert ledger.standings()["m"]["fp16"].state == "serving"
    ledger.add("other", [parcel(1, *[BAD] * 5)])
    standing = ledger.standings()["m"]["fp16"]
    assert (standing.state, standing.samples) == ("tripped", 10)
    assert standing.floor == {"rel_l2": 1e-7}


def test_a_parcel_counts_once() -> None:
    """However often it is told, and whatever comes with it; a new gateway's numbers begin anew."""
    ledger = PrecisionLedger([model()])
    first, second = parcel(1, GOOD), parcel(2, GOOD, GOOD)
    for told in ((first,), (first, second), (second,), (first,), ()):
        ledger.add("one", told)
    assert ledger.standings()["m"]["fp16"].samples == 3
    ledger.add("other", [first])
    assert ledger.standings()["m"]["fp16"].samples == 4


def test_figures_of_models_and_tiers_that_it_does_not_know_are_left_out() -> None:
    """A gateway of another configuration must not break the beat."""
    ledger = PrecisionLedger([model(), model("lone", tiers={"fp16": {}}), model("plain", tiers={"fp32": {}})])
    ledger.add(
        "one", [parcel(1, BAD, name="nobody"), parcel(2, BAD, tier="mixed"), parcel(3, BAD, tier="fp32")]
    )
    ledger.restore("two", {"nobody": {"fp16": Standing("tripped")}, "m": {"mixed": Standing("tripped")}})
    assert set(ledger.standings()) == {"m", "plain"}
    assert ledger.standings()["plain"] == {}
    assert ledger.standings()["m"]["fp16"].samples == 0


def test_metrics_show_one_state_at_a_time() -> None:
    """One-hot; the ratio is there as soon as there is one, and after a trip tells what tripped."""
    ledger = PrecisionLedger([model()])
    assert samples(ledger) == {
        ("halftone_budget_state", "serving"): 1,
        ("halftone_budget_state", "tripped"): 0,
        ("halftone_budget_state", "probing"): 0,
        ("halftone_budget_limit", ""): 0.01,
        ("halftone_budget_allowed_share", ""): pytest.approx(0.01),
    }
    ledger.add("one", [parcel(1, GOOD)])
    assert samples(ledger)["halftone_budget_ratio", ""] == pytest.approx(0.01)
    ledger.add("one", [parcel(2, *[math.inf] * 10)])
    shown = samples(ledger)
    assert shown["halftone_budget_state", "tripped"] == 1
    assert shown["halftone_budget_state", "serving"] == 0
    assert shown["halftone_budget_ratio", ""] == math.inf
    ledger.set_by_hand("m", "fp16", "reset", "by hand")
    assert ("halftone_budget_ratio", "") not in samples(ledger)


def test_a_new_hub_takes_over_what_gateways_remember() -> None:
    """A tripped tier stays tripped, held or not, with its reason."""
    ledger = PrecisionLedger([model()])
    ledger.restore("one", {"m": {"fp16": Standing("tripped", "over the budget", is_held=True)}})
    standing = ledger.standings()["m"]["fp16"]
    assert (standing.state, standing.reason, standing.is_held) == ("tripped", "over the budget", True)


def test_a_gateway_that_is_new_undoes_nothing() -> None:
    """It remembers nothing; nor does one that believes the tier to serve."""
    ledger = PrecisionLedger([model()])
    ledger.restore("one", {"m": {"fp16": Standing("tripped")}})
    ledger.restore("new", {})
    ledger.restore("other", {"m": {"fp16": Standing("serving")}})
    assert ledger.standings()["m"]["fp16"].state == "tripped"


def test_only_a_first_beat_is_remembered() -> None:
    """Later ones tell what this hub said a moment ago: a tier that has recovered since stays so."""
    ledger = PrecisionLedger([model()])
    ledger.restore("one", {})
    ledger.add("one", [parcel(1, *[GOOD] * 10)])
    ledger.restore("one", {"m": {"fp16": Standing("tripped")}})
    assert ledger.standings()["m"]["fp16"].state == "serving"


def test_what_a_person_said_counts_more_than_what_a_gateway_remembers() -> None:
    """Also when that gateway's first beat comes later."""
    ledger = PrecisionLedger([model()])
    ledger.restore("one", {"m": {"fp16": Standing("tripped", is_held=True)}})
    ledger.set_by_hand("m", "fp16", "reset", "by hand")
    ledger.restore("late", {"m": {"fp16": Standing("tripped", is_held=True)}})
    assert ledger.standings()["m"]["fp16"].state == "serving"
    assert ledger.standings()["m"]["fp16"].reason == "reset by hand"


def test_a_tier_is_tripped_by_hand() -> None:
    """And no figure puts it back."""
    ledger = PrecisionLedger([model()])
    ledger.set_by_hand("m", "fp16", "trip", "by hand: 'new driver'")
    ledger.add("one", [parcel(1, *[GOOD] * 100)])
    standing = ledger.standings()["m"]["fp16"]
    assert (standing.state, standing.is_held) == ("tripped", True)
    assert standing.reason == "tripped by hand: 'new driver'"


def test_many_models_are_kept_apart() -> None:
    """A hundred, each with its own windows."""
    ledger = PrecisionLedger([model(f"m{number}") for number in range(100)])
    ledger.add("one", [parcel(1, *[BAD] * 10, name="m7")])
    tripped = [name for name, tiers in ledger.standings().items() if tiers["fp16"].state == "tripped"]
    assert tripped == ["m7"]
