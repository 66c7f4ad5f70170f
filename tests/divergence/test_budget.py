"""The budget's states: every arrow, what each takes, and no flapping."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.divergence.budget import STATES, BudgetRule, TierBudget

RULE = BudgetRule("rel_l2", 1e-2, 0.9, window=100, min_samples=20, recover_ratio=0.8, cooldown_s=30.0)
GOOD, BAD, AT_LIMIT = 1e-3, 1.0, 1e-2


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Budget(TierBudget):
    """With its clock, and rows of one figure."""

    def __init__(self, rule: BudgetRule = RULE) -> None:
        self.clock = Clock()
        super().__init__(rule, self.clock)

    def rows(self, count: int, figure: float) -> str:
        """Rows that were compared. Returns the state."""
        self.add(np.full(count, figure))
        return self.state


def tripped() -> Budget:
    """One that has just tripped."""
    budget = Budget()
    budget.rows(20, BAD)
    assert budget.state == "tripped"
    return budget


def probing() -> Budget:
    """One that has recovered well enough to be tried."""
    budget = tripped()
    budget.clock.now_s += 30
    assert budget.rows(20, GOOD) == "probing"
    return budget


def test_it_serves_at_first() -> None:
    """And says what that rests on."""
    budget = Budget()
    assert (budget.state, budget.samples, budget.reason) == ("serving", 0, "no row has been compared yet")
    assert math.isnan(budget.measured)
    assert math.isnan(budget.ratio)
    budget.rows(7, BAD)
    assert budget.reason == "7 of 20 rows that it takes are compared"
    assert budget.ratio == 100


def test_too_few_rows_trip_nothing() -> None:
    """However bad."""
    budget = Budget()
    assert budget.rows(19, math.inf) == "serving"
    assert budget.rows(1, math.inf) == "tripped"


def test_a_quantile_over_the_limit_trips() -> None:
    """Not one at the limit: that is within it."""
    budget = Budget()
    assert budget.rows(100, AT_LIMIT) == "serving"
    assert budget.ratio == 1
    assert budget.rows(10, BAD) == "serving"  # A tenth is beyond the quantile.
    assert budget.rows(1, BAD) == "tripped"
    assert "rel_l2 at quantile 0.9 is 1, over the budget of 0.01, over 100 rows" in budget.reason


def test_the_ratio_after_a_trip_is_the_one_that_tripped() -> None:
    """Until rows have been compared since."""
    budget = tripped()
    assert (budget.samples, budget.ratio) == (0, 100)
    budget.rows(1, GOOD)
    assert budget.ratio == pytest.approx(0.1)


def test_a_tripped_tier_waits_for_the_cooldown_and_for_rows() -> None:
    """Both."""
    budget = tripped()
    assert budget.rows(50, GOOD) == "tripped"
    budget.clock.now_s += 30
    assert budget.rows(1, GOOD) == "probing"
    other = tripped()
    other.clock.now_s += 30
    assert other.rows(19, GOOD) == "tripped"
    assert other.rows(1, GOOD) == "probing"


@pytest.mark.parametrize(("figure", "state"), [(0.0081, "tripped"), (0.008, "probing"), (0.01, "tripped")])
def test_recovery_asks_for_less_than_the_limit(figure: float, state: str) -> None:
    """By the ratio."""
    budget = tripped()
    budget.clock.now_s += 30
    assert budget.rows(20, figure) == state


def test_a_probe_decides_after_enough_rows() -> None:
    """Those since it began."""
    budget = probing()
    assert budget.rows(19, GOOD) == "probing"
    assert budget.rows(1, GOOD) == "serving"
    other = probing()
    assert other.rows(20, BAD) == "tripped"
    third = probing()
    assert third.rows(20, AT_LIMIT) == "serving"


def test_figures_at_the_threshold_trip_once_and_stay() -> None:
    """Between the ratio and the limit nothing moves."""
    budget = Budget()
    states = []
    for figure in [1.01e-2] + [0.99e-2, 1.01e-2] * 500:
        budget.clock.now_s += 10
        budget.rows(20, figure)
        states.append(budget.state)
    assert states == ["tripped"] * len(states)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.1, 2.0])
def test_scattered_figures_do_not_flap(factor: float) -> None:
    """Whose true quantile is this times the limit: half a million rows with a heavy tail, in 3 hours."""
    rule = replace(RULE, quantile=0.99, window=1000, min_samples=200)
    budget = Budget(rule)
    rng = np.random.default_rng(3)
    at_quantile = math.exp(2.3263)  # Of the standard log-normal distribution.
    changes = 0
    for _ in range(10_000):
        budget.clock.now_s += 1
        figures = rng.lognormal(size=50) / at_quantile * rule.limit * factor
        changes += budget.add(figures) is not None
    # Without longer cooldowns for relapses it was up to 294.
    assert changes <= 40, f"{changes} changes of state"


def recovered(budget: Budget, cooldown_s: float) -> bool:
    """Whether a tripped tier serves again after that time and no sooner."""
    budget.clock.now_s += cooldown_s - 1
    assert budget.rows(100, GOOD) == "tripped"
    budget.clock.now_s += 1
    return [budget.rows(20, GOOD), budget.rows(20, GOOD)] == ["probing", "serving"]


def test_a_relapse_has_to_cool_twice_as_long() -> None:
    """Up to a limit; a tier that has served for a while begins anew."""
    budget = tripped()
    for cooldown_s in (30, 60, 120, 240, 480, 960, 1920, 1920):
        assert recovered(budget, cooldown_s)
        assert budget.rows(100, BAD) == "tripped"
    assert recovered(budget, 1920)
    budget.clock.now_s += 4 * 1920 + 1
    assert budget.rows(100, BAD) == "tripped"
    assert recovered(budget, 30)


def test_a_failed_probe_is_a_relapse() -> None:
    """The tier has not recovered at all."""
    budget = probing()
    assert budget.rows(20, BAD) == "tripped"
    assert recovered(budget, 60)


def test_a_reset_forgets_relapses() -> None:
    """A person knows better."""
    budget = probing()
    budget.rows(20, BAD)
    budget.reset("reset by hand")
    assert budget.rows(20, BAD) == "tripped"
    assert recovered(budget, 30)


def test_a_tier_tripped_by_hand_stays_so() -> None:
    """Until a person resets it."""
    budget = Budget()
    budget.trip("tripped by hand: 'maintenance'")
    budget.clock.now_s += 10_000
    assert budget.rows(1000, GOOD) == "tripped"
    assert budget.is_held
    assert budget.reason == "tripped by hand: 'maintenance'"
    budget.reset("reset by hand")
    assert (budget.state, budget.is_held, budget.samples) == ("serving", False, 0)
    assert budget.reason == "reset by hand"
    assert math.isnan(budget.ratio)
    assert budget.rows(20, BAD) == "tripped"


def test_a_reset_ends_any_state() -> None:
    """Also one that was not set by hand."""
    for budget in (tripped(), probing()):
        budget.reset("reset by hand")
        assert budget.state == "serving"


def test_a_restored_tier_goes_on_where_it_was() -> None:
    """Its cooldown starts anew: how long it has cooled is not known."""
    budget = Budget()
    budget.restore("tripped", is_held=False, reason="was over the budget")
    assert budget.rows(20, GOOD) == "tripped"
    budget.clock.now_s += 30
    assert budget.rows(1, GOOD) == "probing"
    held = Budget()
    held.restore("tripped", is_held=True, reason="by hand")
    held.clock.now_s += 30
    assert held.rows(100, GOOD) == "tripped"


def test_a_window_of_one_row() -> None:
    """Each row decides alone."""
    budget = Budget(replace(RULE, window=1, min_samples=1, cooldown_s=0))
    assert budget.rows(1, GOOD) == "serving"
    assert budget.rows(1, BAD) == "tripped"
    assert budget.rows(1, GOOD) == "probing"
    assert budget.rows(1, GOOD) == "serving"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["rows", "trip", "reset", "wait"]),
            st.lists(st.floats(0, 1) | st.just(math.inf), max_size=40),
        ),
        max_size=40,
    )
)
def test_no_arrow_but_those_of_the_drawing(steps: list[tuple[str, list[float]]]) -> None:
    """Serving never probes, a tripped tier never serves without a probe or a person."""
    arrows = {("serving", "tripped"), ("tripped", "probing"), ("probing", "serving"), ("probing", "tripped")}
    budget = Budget(replace(RULE, limit=0.5))
    for action, figures in steps:
        before, was_held = budget.state, budget.is_held
        if action == "rows":
            entered = budget.add(np.array(figures))
            assert entered is None or (before, entered) in arrows
            assert (entered or before) == budget.state
            assert not (was_held and entered)
        elif action == "wait":
            budget.clock.now_s += 31
        elif action == "trip":
            budget.trip("by hand")
            assert budget.state == "tripped"
        else:
            budget.reset("by hand")
            assert budget.state == "serving"
        assert budget.state in STATES
