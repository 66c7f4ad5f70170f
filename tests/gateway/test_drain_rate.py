"""When a refused client should come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.drain_rate import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, DrainRate


def after(
    *batches: tuple[int, float], rate: DrainRate | None = None, start_s: float = 0.0
) -> tuple[DrainRate, float]:
    """A rate that has seen batches of (rows, seconds), one after the other, and the time of the last."""
    rate = rate or DrainRate()
    now_s = start_s
    for rows, seconds in batches:
        now_s += seconds
        rate.note(rows, seconds, now_s)
    return rate, now_s


def test_nothing_known_is_a_second() -> None:
    """The first batch has not come back yet."""
    assert DrainRate().retry_after_s(1000, 8, 100.0) == MIN_RETRY_AFTER_S


def test_the_queue_s_rows_at_the_rate_of_late() -> None:
    """Rounded up, between a second and a minute."""
    rate, now_s = after(*[(4, 2.0)] * 5)
    assert rate.retry_after_s(40, 8, now_s) == 20
    assert rate.retry_after_s(1, 8, now_s) == MIN_RETRY_AFTER_S
    assert rate.retry_after_s(10_000, 8, now_s) == MAX_RETRY_AFTER_S


def test_a_tier_that_becomes_slow_is_known_to_be_within_a_few_batches() -> None:
    """However fast it was before: 1,000 rows/s, and 10 rows/s from now on."""
    rate, now_s = after(*[(10, 0.01)] * 500)
    assert rate.retry_after_s(100, 10, now_s) == 1
    rate, now_s = after(*[(10, 1.0)] * 6, rate=rate, start_s=now_s)
    assert 9 <= rate.retry_after_s(100, 10, now_s) <= 11


def test_a_tier_that_becomes_fast_is_believed_as_soon_as_it_has_been_for_a_while() -> None:
    """Fifty fast batches, half a second of them."""
    rate, now_s = after(*[(10, 1.0)] * 50)
    rate, now_s = after(*[(10, 0.01)] * 50, rate=rate, start_s=now_s)
    assert rate.retry_after_s(200, 10, now_s) <= 2


def test_a_tier_that_hangs_is_not_taken_for_a_fast_one() -> None:
    """No batch has come back for 30 s: what is in flight has taken that long at least."""
    rate, now_s = after(*[(10, 0.01)] * 50)
    assert rate.retry_after_s(100, 10, now_s + 0.001) == 1
    assert rate.retry_after_s(10, 10, now_s + 30) == 30
    assert rate.retry_after_s(100, 10, now_s + 30) == MAX_RETRY_AFTER_S


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 1e4)), max_size=20),
    st.integers(0, 10**7),
    st.integers(0, 10_000),
    st.floats(0, 1e6),
)
def test_it_is_always_a_number_of_seconds_that_a_client_can_wait(
    batches: list[tuple[int, float]], queue_rows: int, inflight_rows: int, later_s: float
) -> None:
    """Whatever was measured."""
    rate, now_s = after(*batches)
    found = rate.retry_after_s(queue_rows, inflight_rows, now_s + later_s)
    assert MIN_RETRY_AFTER_S <= found <= MAX_RETRY_AFTER_S


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_batches_that_overlap_share_the_time(replicas: int) -> None:
    """Each is noted with its share of the tier's time."""
    rate = DrainRate()
    for turn in range(20):
        for _ in range(replicas):
            rate.note(10, 1.0 / replicas, float(turn))
    assert 10 / replicas <= rate.retry_after_s(100, 0, 20.0) <= 10 / replicas + 1
