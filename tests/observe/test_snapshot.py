"""Snapshots added up: exactly, and never down."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from serving.observe.snapshot import Family, Merger, Snapshot, fold

KEY = ("seconds_sum", (("tier", "fp32"),))
SECONDS = st.floats(1e-9, 1e6)


def snapshot(seconds: float) -> Snapshot:
    """A histogram that has only its sum, and a gauge."""
    return (
        Family("seconds", "histogram", "Time.", {KEY: seconds}),
        Family("rows", "gauge", "Rows.", {("rows", ()): 1.0}),
    )


@given(SECONDS, SECONDS)
def test_what_is_added_for_good_is_rounded_up(one: float, other: float) -> None:
    """By a digit at most; a gauge does not outlive its process."""
    (family,) = fold(snapshot(one), snapshot(other))
    exact = Fraction(one) + Fraction(other)
    assert Fraction(family.samples[KEY]) >= exact
    assert family.samples[KEY] - float(exact) <= 2 * (one + other) * 2**-52


def test_a_sum_that_is_exact_stays_so() -> None:
    """Whole numbers, for one."""
    (family,) = fold(snapshot(3.0), snapshot(4.0))
    assert family.samples[KEY] == 7.0
    (family,) = fold(snapshot(1.0), snapshot(2.0**-54))
    assert family.samples[KEY] > 1.0


@given(
    st.lists(SECONDS, min_size=1, max_size=20).flatmap(
        lambda some: st.tuples(st.just(some), st.permutations(some))
    )
)
def test_the_order_of_processes_changes_no_digit(orders: tuple[list[float], list[float]]) -> None:
    """Nor which hub adds them."""
    found = set()
    for order in orders:
        merger = Merger()
        for seconds in order:
            merger.add(snapshot(seconds), alive=True)
        found.add({family.name: family for family in merger.families()}["seconds"].samples[KEY])
    assert len(found) == 1
