"""Windows: quantiles as sorting gives them, and bounds that hold as often as they say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.divergence.quantiles import CONFIDENCE, Window

FIGURES = st.lists(st.floats(0, 1e6) | st.just(math.inf), max_size=60)


@given(st.lists(FIGURES, max_size=6), st.integers(1, 40), st.floats(0.01, 0.99))
def test_the_quantile_is_that_of_the_newest(pushed: list[list[float]], size: int, share: float) -> None:
    """The smallest figure that at least that share does not exceed; pushed in any portions."""
    window = Window(size)
    seen: list[float] = []
    for figures in pushed:
        window.extend(np.array(figures, float))
        seen = (seen + figures)[-size:]
        assert window.samples == len(seen)
        if seen:
            wanted = np.quantile(np.array(seen), share, method="inverted_cdf")
            assert window.quantile(share) == wanted
        else:
            assert math.isnan(window.quantile(share))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=400), st.floats(0.01, 0.99))
def test_the_bound_is_no_less_than_the_quantile(figures: list[float], share: float) -> None:
    """Infinity while there are too few."""
    window = Window(400)
    window.extend(np.array(figures))
    assert window.upper_bound(share) >= window.quantile(share)


@pytest.mark.parametrize(("share", "needed"), [(0.99, 299), (0.95, 59), (0.5, 5)])
def test_a_bound_takes_samples(share: float, needed: int) -> None:
    """The known smallest numbers for 95 % confidence: the largest of n is a bound when q^n <= 5 %."""
    assert share**needed <= 1 - CONFIDENCE < share ** (needed - 1)
    window = Window(1000)
    window.extend(np.ones(needed - 1))
    assert window.upper_bound(share) == math.inf
    window.extend(np.ones(1))
    assert window.upper_bound(share) == 1.0


@pytest.mark.parametrize(("share", "samples"), [(0.99, 300), (0.99, 1000), (0.9, 150), (0.5, 11)])
def test_the_bound_holds_as_often_as_it_says(share: float, samples: int) -> None:
    """Over 4,000 windows of evenly distributed figures, whose quantile is the share itself."""
    rng = np.random.default_rng(1)
    window = Window(samples)
    held = 0
    for figures in rng.random((4000, samples)):
        window.extend(figures)
        held += window.upper_bound(share) >= share
    # Three standard errors of 4,000 trials below.
    assert held / 4000 >= CONFIDENCE - 3 * math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / 4000)


def test_a_bound_is_not_far_off() -> None:
    """Or it would be of no use: of 1,000 figures the 99 % quantile's is below the 99.9 % quantile's value."""
    window = Window(1000)
    window.extend(np.arange(1000) / 1000)
    assert 0.99 < window.upper_bound(0.99) < 0.999


def test_a_cleared_window_forgets() -> None:
    """Also what it had sorted."""
    window = Window(10)
    window.extend(np.full(10, 9.0))
    assert window.quantile(0.5) == 9
    window.clear()
    assert window.samples == 0
    assert math.isnan(window.quantile(0.5))
    window.extend(np.ones(1))
    assert window.quantile(0.5) == 1


def test_a_window_of_one() -> None:
    """The last figure."""
    window = Window(1)
    window.extend(np.array([3.0, 2.0, 1.0]))
    assert (window.samples, window.quantile(0.99)) == (1, 1.0)
    assert window.upper_bound(0.99) == math.inf
