"""Arrivals are a Poisson process with the rate that was asked for, bursts included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.open_loop.arrivals import Bursts, arrivals

RATE_PER_S, DURATION_S = 500.0, 40.0


def test_gaps_between_arrivals_are_exponential() -> None:
    """The Kolmogorov-Smirnov distance to the exponential distribution is below its 0.1 % point."""
    gaps = np.sort(np.diff(arrivals(RATE_PER_S, DURATION_S, np.random.default_rng(1))))
    expected = 1 - np.exp(-RATE_PER_S * gaps)
    empirical = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(empirical - expected).max() < 1.95 / np.sqrt(len(gaps))


def test_counts_per_second_vary_as_much_as_they_are() -> None:
    """Variance over mean is 1: evenly spaced requests would give 0."""
    due_s = arrivals(RATE_PER_S, DURATION_S, np.random.default_rng(2))
    counts = np.histogram(due_s, bins=400, range=(0, DURATION_S))[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.3)


@given(
    factor=st.floats(1, 10),
    load=st.floats(0.05, 1),
    period_s=st.floats(0.2, 5),
    seed=st.integers(0, 2**32),
)
def test_bursts_keep_the_mean_rate_and_the_order(
    factor: float, load: float, period_s: float, seed: int
) -> None:
    """Whatever the bursts, the number of arrivals is within 6 standard deviations of rate × time."""
    share = min(load / factor, 0.99)
    due_s = arrivals(RATE_PER_S, 20 * period_s, np.random.default_rng(seed), Bursts(factor, share, period_s))
    expected = RATE_PER_S * 20 * period_s
    assert abs(len(due_s) - expected) < 6 * np.sqrt(expected)
    assert np.all(np.diff(due_s) >= 0)
    assert due_s[0] >= 0
    assert due_s[-1] < 20 * period_s


def test_within_bursts_the_rate_is_the_factor_times_the_mean() -> None:
    """5 times the rate for a tenth of the time holds half of the arrivals."""
    bursts = Bursts(5, 0.1, 2.0)
    due_s = arrivals(RATE_PER_S, DURATION_S, np.random.default_rng(3), bursts)
    assert np.mean(due_s % 2.0 < 0.2) == pytest.approx(0.5, abs=0.02)
    assert bursts.rate_between == pytest.approx(0.5 / 0.9)


def test_bursts_that_take_all_leave_nothing_between() -> None:
    """An on-off source."""
    due_s = arrivals(RATE_PER_S, DURATION_S, np.random.default_rng(4), Bursts(5, 0.2, 1.0))
    assert np.all(due_s % 1.0 <= 0.2 + 1e-9)


@pytest.mark.parametrize("figures", [(5, 0.3, 1), (0.5, 0.1, 1), (2, 0, 1), (2, 1, 1), (2, 0.1, 0)])
def test_impossible_bursts_are_refused(figures: tuple[float, float, float]) -> None:
    """More than the mean rate holds, or out of range."""
    with pytest.raises(ValueError, match="bursts"):
        Bursts(*figures)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    """So two servers get the same load."""
    first, second = (arrivals(50, 5, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(first, second)
