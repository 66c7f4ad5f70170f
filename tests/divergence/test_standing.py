"""What a ledger keeps of a tier, and tells."""

import logging
import math

import pytest

from serving.divergence.budget import BudgetRule
from serving.divergence.standing import FloorLedger, Standing, TierLedger

RULE = BudgetRule("rel_l2", 1e-2, 0.9, window=100, min_samples=20, recover_ratio=0.8, cooldown_s=0.0)


def ledger() -> TierLedger:
    """Of a tier that nothing is known of."""
    return TierLedger("m/fp16", RULE, lambda: 0.0)


def test_at_first_nothing_is_known() -> None:
    """No quantile, no bound, no ratio."""
    found = ledger().standing({})
    assert (found.state, found.samples, dict(found.metrics), dict(found.floor)) == ("serving", 0, {}, {})
    assert math.isnan(found.ratio)
    assert Standing().state == "serving"


def test_every_metric_has_its_window() -> None:
    """NaN is no figure; an unknown metric, from a newer gateway, is left out."""
    tier = ledger()
    tier.add({"rel_l2": (1e-3, 2e-3), "max_abs": (math.nan, 0.5), "unheard_of": (1.0,)})
    found = tier.standing({"rel_l2": 1e-7})
    assert found.samples == 2
    assert {metric: known.quantile for metric, known in found.metrics.items()} == {
        "rel_l2": 2e-3,
        "max_abs": 0.5,
    }
    assert found.metrics["rel_l2"].bound == math.inf
    assert found.ratio == pytest.approx(0.2)
    assert found.floor == {"rel_l2": 1e-7}


def test_infinity_trips() -> None:
    """A row that cannot be compared is over any budget."""
    tier = ledger()
    tier.add({"rel_l2": (math.inf,) * 20})
    assert tier.standing({}).state == "tripped"


def test_an_operator_is_told_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """Which tier, which figure, which limit; a trip is a warning."""
    caplog.set_level(logging.INFO, "halftone.precision")
    tier = ledger()
    for figure in (1.0, 1e-4, 1e-4):
        tier.add({"rel_l2": (figure,) * 20})
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    quantile = "rel_l2 at quantile 0.9 is"
    assert told == [
        ("WARNING", f"tier m/fp16 is tripped: {quantile} 1, over the budget of 0.01, over 20 rows"),
        ("INFO", f"tier m/fp16 is probing: {quantile} 0.0001, well within the budget of 0.01, over 20 rows"),
        ("INFO", f"tier m/fp16 is serving: {quantile} 0.0001, within the budget of 0.01, over 20 rows"),
    ]


def test_a_reset_forgets_every_figure() -> None:
    """The tolerances' too: the tier may be another one now."""
    tier = ledger()
    tier.add({"rel_l2": (1.0,) * 30, "max_abs": (1.0,) * 30})
    tier.reset("reset by hand")
    found = tier.standing({})
    assert (found.state, found.samples, dict(found.metrics)) == ("serving", 0, {})


def test_a_metric_that_applies_to_no_output_is_said_to() -> None:
    """A budget on rel_l2 over outputs of text never acts."""
    tier = ledger()
    tier.add({"rel_l2": (math.nan,) * 50, "share_1e2": (0.0,) * 50})
    found = tier.standing({})
    assert found.reason == "rel_l2 applies to none of the model's outputs"
    assert found.samples == 50


def test_the_floor_is_a_quantile_of_its_own_window() -> None:
    """Metrics that were never measured are absent."""
    floor = FloorLedger(4, 0.5)
    assert floor.floor() == {}
    floor.add({"rel_l2": (9.0, 1.0, 2.0, 3.0, 4.0), "cosine_distance": (math.nan,)})
    assert floor.floor() == {"rel_l2": 2.0}
