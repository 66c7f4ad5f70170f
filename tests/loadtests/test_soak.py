"""What the soak test says of replies; what it says of growth is in `test_growth.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadtests.growth import Figures, Watch
from loadtests.growth.figures import Sample
from loadtests.open_loop import Outcome
from loadtests.open_loop.connection import LOST
from loadtests.soak.__main__ import report


@pytest.fixture
def watch() -> Watch:
    """A server that holds the same all the time."""
    made = Watch("http://127.0.0.1:1", 1, Path())
    figures = {"gateway 1": Figures(100, 10, 10, 1)}
    made.samples = [Sample(float(second), figures, frozenset()) for second in range(10)]
    return made


def outcome(refused: dict[tuple[str, int], int], violations: int = 0) -> Outcome:
    """Ten requests, some of them refused."""
    due_s = np.arange(10.0)
    status = np.full(10, 200)
    wanted = [code for (_, code), count in refused.items() for _ in range(count)]
    status[: len(wanted)] = wanted
    return Outcome(due_s, due_s, due_s + 0.1, status, np.zeros(10, bool), violations, 20.0, refused=refused)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({("no inputs", 400): 2, ("unknown tier", 400): 1}, []),
        ({("fp32/1/json", 400): 1}, ["1 replies 400 to fp32/1/json"]),
        ({("metrics", 503): 1}, ["1 replies 503 to metrics"]),
        ({("unknown tier", 500): 2}, ["2 replies 500 to unknown tier"]),
    ],
)
def test_a_reply_that_was_not_expected_is_told(
    watch: Watch, refused: dict[tuple[str, int], int], words: list[str]
) -> None:
    """With what was asked."""
    assert report(outcome(refused), watch, 2.0)["problems"] == words


def test_lost_requests_and_broken_contracts_are_told(watch: Watch) -> None:
    """Neither has a status of its own."""
    lost = outcome({}, violations=3)
    lost.status[0] = LOST
    assert report(lost, watch, 2.0)["problems"] == [
        "1 requests without a reply",
        "3 answers less precise than declared",
    ]
