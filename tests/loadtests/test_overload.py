"""The overload test sees what is wrong with an overloaded server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtests.open_loop import Outcome
from loadtests.open_loop.connection import LOST
from loadtests.overload.__main__ import CAPACITY_PER_S, report

DURATION_S = 10.0


def outcome(refused_ms: float = 5.0, answered: int = 800, other: int | None = None, **kinds: int) -> Outcome:
    """Ten times the capacity for ten seconds."""
    count = int(10 * CAPACITY_PER_S * DURATION_S)
    due_s = np.linspace(0, DURATION_S, count)
    status = np.full(count, 503)
    status[:answered] = 200
    if other is not None:
        status[-1] = other
    done_s = due_s + np.where(status == 503, refused_ms / 1000, 0.3)
    counts = {"violations": 0, "unannounced": 0, **kinds}
    return Outcome(due_s, due_s, done_s, status, np.zeros(count, bool), end_s=20.0, **counts)


def test_a_server_that_refuses_well_passes() -> None:
    """With the figures that the report is read for."""
    found = report(outcome(), 10.0, DURATION_S)
    assert found["problems"] == []
    assert found["offered/capacity"] == pytest.approx(10, rel=0.01)
    assert found["refusal_ms"]["p50"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"refused_ms": 51.0}, "median refusal took 51"),
        ({"violations": 1}, "less precise tier"),
        ({"unannounced": 3}, "without Retry-After"),
        ({"other": 500}, "1 replies 500"),
        ({"other": LOST}, "1 replies -1"),
        ({"answered": 100}, "only 100"),
        ({"answered": 8000}, "nothing was refused"),
    ],
)
def test_each_fault_is_told(made: dict[str, Any], words: str) -> None:
    """One at a time."""
    [problem] = report(outcome(**made), 10.0, DURATION_S)["problems"]
    assert words in problem
