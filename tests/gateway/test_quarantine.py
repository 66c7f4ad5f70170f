"""Rows that are refused for a while: the right ones, for as long as was said, and not too many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import Quarantined
from serving.gateway.quarantine import MAX_ROWS, QUARANTINE_S, Quarantine
from serving.tensors import Tensors, slice_rows


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def rows(*values: float) -> Tensors:
    """[rows, 2]."""
    return {"x": np.array([[value, 1.0] for value in values], np.float32)}


def is_refused(quarantine: Quarantine, tensors: Tensors) -> bool:
    """Whether a request of these rows is."""
    try:
        quarantine.check(tensors)
    except Quarantined:
        return True
    return False


def test_a_row_is_known_in_whatever_request_it_comes() -> None:
    """The refusal says which it is; others pass."""
    quarantine = Quarantine(Clock())
    quarantine.check(rows(1, 2))
    quarantine.add(rows(2))
    with pytest.raises(Quarantined, match="row 1 ended the process"):
        quarantine.check(rows(1, 2, 3))
    assert not is_refused(quarantine, rows(1, 3))


def test_it_ends() -> None:
    """A repaired model gets another try."""
    clock = Clock()
    quarantine = Quarantine(clock)
    quarantine.add(rows(1))
    clock.now_s = QUARANTINE_S - 1
    assert is_refused(quarantine, rows(1))
    clock.now_s = QUARANTINE_S
    assert not is_refused(quarantine, rows(1))
    assert not quarantine


def test_it_is_bounded() -> None:
    """The oldest row makes room."""
    quarantine = Quarantine(Clock())
    for value in range(MAX_ROWS + 1):
        quarantine.add(rows(value))
    assert len(quarantine) == MAX_ROWS
    assert not is_refused(quarantine, rows(0))
    assert is_refused(quarantine, rows(1))


def test_a_row_that_is_added_again_lasts_longer() -> None:
    """From the last time on."""
    clock = Clock()
    quarantine = Quarantine(clock)
    quarantine.add(rows(1))
    quarantine.add(rows(2))
    clock.now_s = QUARANTINE_S / 2
    quarantine.add(rows(1))
    clock.now_s = QUARANTINE_S * 1.4
    assert is_refused(quarantine, rows(1))
    assert not is_refused(quarantine, rows(2))


TENSORS = st.fixed_dictionaries(
    {
        "x": st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2),
        "text": st.lists(st.binary(max_size=4), min_size=2, max_size=2),
    }
).map(
    lambda drawn: {
        "x": np.array([drawn["x"]], np.float32),
        "text": np.array([drawn["text"]], object),
    }
)


@given(TENSORS, TENSORS)
def test_rows_are_told_apart_by_all_that_they_hold(one: Tensors, other: Tensors) -> None:
    """Numbers to the bit, and text, whose parts do not run together."""
    quarantine = Quarantine(Clock())
    quarantine.add(one)
    same = one["x"].tobytes() == other["x"].tobytes() and one["text"].tolist() == other["text"].tolist()
    assert is_refused(quarantine, other) is same
    assert is_refused(quarantine, slice_rows(one, 0, 1))
