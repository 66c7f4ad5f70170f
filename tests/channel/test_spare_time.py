"""Time that callers leave over: none while they keep a replica busy, a little beside them, all without."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.channel.spare_time import BACKGROUND_SHARE, BUSY_SHARE, SpareTime


class Replica:
    """A clock, and what it does in that time."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.spare = SpareTime(lambda: self.now_s)

    def compute(self, seconds: float, *, is_background: bool = False) -> None:
        """A batch from begin to end."""
        self.spare.began(is_background)
        self.now_s += seconds
        self.spare.ended(is_background)

    def background_share(self, busy_s: float, gap_s: float, batch_s: float, seconds: float) -> float:
        """Callers' batches with gaps between, in which background batches begin as soon as they may."""
        began_s, taken_s = self.now_s, 0.0
        while self.now_s - began_s < seconds:
            self.compute(busy_s)
            gap_end_s = self.now_s + gap_s
            while self.now_s < gap_end_s:
                if self.spare.allows_background():
                    self.compute(batch_s, is_background=True)
                    taken_s += batch_s
                self.now_s += 0.001
        return taken_s / (self.now_s - began_s)


def test_an_unused_replica_has_all_its_time() -> None:
    """One background batch after another."""
    replica = Replica()
    for _ in range(100):
        assert replica.spare.allows_background()
        replica.compute(0.1, is_background=True)


@pytest.mark.parametrize("is_background", [True, False])
def test_one_batch_at_a_time(is_background: bool) -> None:
    """Whatever is under way."""
    replica = Replica()
    replica.spare.began(is_background)
    assert not replica.spare.allows_background()
    replica.spare.ended(is_background)


@pytest.mark.parametrize(("busy_s", "gap_s"), [(0.06, 0.008), (0.03, 0.02), (0.002, 0.001), (2.0, 0.2)])
def test_callers_who_keep_a_replica_busy_have_it_to_themselves(busy_s: float, gap_s: float) -> None:
    """Gaps between their batches are no idleness."""
    replica = Replica()
    while replica.now_s < 60:
        replica.compute(busy_s)
        replica.now_s += gap_s
    assert replica.spare.callers_share > BUSY_SHARE
    assert replica.background_share(busy_s, gap_s, 0.1, seconds=10) == 0


@pytest.mark.parametrize(("busy_s", "gap_s"), [(0.03, 0.07), (0.001, 0.05), (0.01, 1.0)])
def test_beside_callers_a_twentieth_is_left(busy_s: float, gap_s: float) -> None:
    """Enough to be compared, too little to be felt."""
    share = Replica().background_share(busy_s, gap_s, 0.02, seconds=60)
    assert 0.2 * BACKGROUND_SHARE < share < 1.2 * BACKGROUND_SHARE


def test_callers_who_have_gone_are_forgotten() -> None:
    """Within seconds."""
    replica = Replica()
    replica.compute(60.0)
    assert replica.spare.callers_share == pytest.approx(1.0)
    replica.now_s += 0.5
    assert not replica.spare.allows_background()
    replica.now_s += 0.5
    assert replica.spare.allows_background()
    replica.compute(0.1, is_background=True)
    assert not replica.spare.allows_background()
    replica.now_s += 8
    for _ in range(10):
        assert replica.spare.allows_background()
        replica.compute(0.1, is_background=True)


@given(st.lists(st.tuples(st.sampled_from(["own", "background", "wait"]), st.floats(0, 5)), max_size=50))
def test_the_share_is_one(steps: list[tuple[str, float]]) -> None:
    """Between nothing and all, at any time."""
    replica = Replica()
    for kind, seconds in steps:
        if kind == "wait":
            replica.now_s += seconds
        else:
            replica.compute(seconds, is_background=kind == "background")
        assert 0 <= replica.spare.callers_share <= 1 + 1e-9
