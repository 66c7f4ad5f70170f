"""Which rows are compared: always the same, as many as asked, and each for itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway import sampling
from serving.gateway.sampling import sampled_rows

SHARES = st.floats(0, 1)


@given(st.text(), st.integers(0, 300), SHARES)
def test_the_same_rows_every_time(request_id: str, rows: int, share: float) -> None:
    """Ascending, none twice, none beyond the request."""
    chosen = sampled_rows(request_id, rows, share)
    assert chosen == sampled_rows(request_id, rows, share)
    assert chosen == sorted(set(chosen) & set(range(rows)))
    assert all(type(row) is int for row in chosen)


@given(st.text(), st.integers(1, 100), SHARES)
def test_a_row_does_not_depend_on_the_others(request_id: str, rows: int, share: float) -> None:
    """A longer request samples the same of the first rows, whichever way they are computed."""
    longer = sampled_rows(request_id, rows + 50, share)
    assert sampled_rows(request_id, rows, share) == [row for row in longer if row < rows]


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_samples_more(request_id: str, one: float, other: float) -> None:
    """What a smaller share samples is among it."""
    less, more = sorted((one, other))
    assert set(sampled_rows(request_id, 40, less)) <= set(sampled_rows(request_id, 40, more))


def test_all_and_none() -> None:
    """At the ends."""
    assert sampled_rows("r", 5, 1.0) == [0, 1, 2, 3, 4]
    assert sampled_rows("r", 5, 0.0) == []
    assert sampled_rows("r", 0, 0.5) == []


@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
@pytest.mark.parametrize("rows", [1, sampling._MANY_ROWS, 1000])
def test_the_share_is_right(share: float, rows: int) -> None:
    """Over 20,000 rows of few or many requests, within four standard errors."""
    requests = 20_000 // rows
    chosen = sum(len(sampled_rows(f"request-{n}", rows, share)) for n in range(requests))
    total = requests * rows
    assert abs(chosen - share * total) <= 4 * math.sqrt(total * share * (1 - share))


def test_neighbouring_rows_are_independent() -> None:
    """Both of a pair are in as often as the square of the share."""
    pairs = [sampled_rows(f"request-{n}", 2, 0.3) for n in range(20_000)]
    both = sum(len(chosen) == 2 for chosen in pairs)
    assert abs(both - 0.09 * 20_000) <= 4 * math.sqrt(20_000 * 0.09 * 0.91)


def test_the_rows_of_a_known_request() -> None:
    """A replay in years to come samples these: BLAKE2 and SplitMix64 do not change."""
    assert sampled_rows("halftone", 40, 0.1) == [3, 10, 12, 18]
    assert sampled_rows("halftone", 13, 0.1) == [3, 10, 12]
