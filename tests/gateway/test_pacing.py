"""Wait and size of batches from what batches cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.pacing import Pacer


def noted(pacer: Pacer, cost: tuple[float, float], rows: list[int], times: int = 40) -> Pacer:
    """A pacer that saw batches of a linear cost."""
    for _ in range(times):
        for size in rows:
            compute_s = cost[0] + cost[1] * size
            pacer.note(size, compute_s, compute_s + 0.001)
    return pacer


def test_before_the_first_batch_the_bounds_hold() -> None:
    """Nothing is known."""
    pacer = Pacer(32, 0.002, target_s=0.01)
    assert (pacer.rows, pacer.wait_s) == (32, 0.002)


def test_a_fast_model_waits_for_half_of_a_round_trip() -> None:
    """A slow one for as long as the bound allows."""
    assert noted(Pacer(32, 0.002), (0.0, 0.0), [8]).wait_s == pytest.approx(0.0005)
    assert noted(Pacer(32, 0.002), (0.1, 0.0), [8]).wait_s == 0.002


@given(st.floats(0, 0.1), st.floats(1e-6, 0.01), st.sets(st.integers(1, 64), min_size=2, max_size=5))
def test_a_linear_cost_is_found(fixed_s: float, per_row_s: float, rows: set[int]) -> None:
    """To rounding, from any two sizes that differ."""
    found = noted(Pacer(64, 0.002), (fixed_s, per_row_s), sorted(rows)).cost()
    assert found[0] == pytest.approx(fixed_s, rel=1e-3, abs=1e-6)
    assert found[1] == pytest.approx(per_row_s, rel=1e-3, abs=1e-8)


def test_batches_shrink_to_the_target_and_no_further() -> None:
    """10 ms + 2 ms a row: within 100 ms two batches of 20 rows."""
    assert noted(Pacer(32, 0.002, 0.1), (0.01, 0.002), [4, 16]).rows == 20
    assert noted(Pacer(32, 0.002, 1.0), (0.01, 0.002), [4, 16]).rows == 32
    assert noted(Pacer(32, 0.002, 0.001), (0.01, 0.002), [4, 16]).rows == 1
    assert noted(Pacer(32, 0.002), (0.01, 0.002), [4, 16]).rows == 32


def test_it_follows_a_change() -> None:
    """A model that became three times slower, after some dozens of batches."""
    pacer = noted(Pacer(64, 0.002, 0.1), (0.0, 0.001), [10, 20])
    assert pacer.rows == 50
    assert noted(pacer, (0.0, 0.003), [10, 20], times=100).rows == pytest.approx(16, abs=1)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10), st.floats(0, 10)), max_size=50),
    st.none() | st.floats(1e-4, 10),
)
def test_the_bounds_hold_whatever_is_measured(
    batches: list[tuple[int, float, float]], target_s: float | None
) -> None:
    """And a batch has a row at least."""
    pacer = Pacer(32, 0.002, target_s)
    for rows, compute_s, round_trip_s in batches:
        pacer.note(rows, compute_s, round_trip_s)
        assert 1 <= pacer.rows <= 32
        assert 0 <= pacer.wait_s <= 0.002
        fixed_s, per_row_s = pacer.cost()
        assert min(fixed_s, per_row_s) >= -1e-9
