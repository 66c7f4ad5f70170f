"""Percentiles count from when a request was due."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadtests.open_loop.connection import LOST, UNANSWERED
from loadtests.open_loop.outcome import Outcome


def outcome(due_s: Any, sent_s: Any, done_s: Any, status: Any = 200, **kinds: Any) -> Outcome:
    """An outcome of these times; everything succeeded unless `status` says otherwise."""
    due = np.asarray(due_s, dtype=float)
    return Outcome(
        due_s=due,
        sent_s=np.asarray(sent_s, dtype=float),
        done_s=np.asarray(done_s, dtype=float),
        status=np.broadcast_to(np.asarray(status), due.shape),
        waited=np.asarray(kinds.get("waited", np.zeros(due.shape, dtype=bool))),
        violations=0,
        end_s=kinds.get("end_s", 10.0),
    )


def test_a_stall_shows_in_full_though_each_request_was_quick_once_sent() -> None:
    """1000 requests due over 10 s; from 5 to 6 s nothing can be sent; each takes 1 ms once it is."""
    due_s = np.arange(1000) / 100
    sent_s = np.where((due_s >= 5) & (due_s < 6), 6.0, due_s)
    found = outcome(due_s, sent_s, sent_s + 0.001, waited=sent_s > due_s).summary()
    assert found["from_send_ms"]["p99"] == pytest.approx(1.0, abs=0.01)
    # A tenth of all requests wait between 0 and 1 s: p99 is nine tenths of the stall.
    assert found["latency_ms"]["p99"] == pytest.approx(900, abs=15)
    assert found["latency_ms"]["max"] == pytest.approx(1001, abs=1)
    assert found["waited_for_a_connection"] == 100
    assert not found["kept_up"]


def test_percentiles_are_exact() -> None:
    """Of 1 to 1000 ms, by linear interpolation."""
    due_s = np.zeros(1000)
    found = outcome(due_s, due_s, np.arange(1, 1001) / 1000).summary()["latency_ms"]
    assert found == {"p50": 500.5, "p90": 900.1, "p99": 990.01, "p99.9": 999.001, "max": 1000.0}


def test_a_request_without_an_answer_counts_for_as_long_as_the_run_waited() -> None:
    """Or else a server that stops answering would look fast."""
    found = outcome([0, 1], [0, 1], [0.01, np.nan], [200, UNANSWERED], end_s=8.0)
    assert found.latencies_s.tolist() == [0.01, 7.0]
    assert found.summary()["failures"] == {"no answer": 1}


def test_refusals_and_lost_connections_are_failures_without_a_latency() -> None:
    """A quick 503 must not improve the percentiles."""
    found = outcome([0, 0, 0], [0, 0, 0], [1, 0.001, 0.001], [200, 503, LOST])
    assert found.latencies_s.tolist() == [1.0]
    assert found.summary()["failures"] == {"503": 1, "connection lost": 1}
    assert found.summary()["succeeded"] == 1


def test_a_generator_that_is_late_itself_says_so() -> None:
    """No request waited for a connection, yet they left 20 ms late."""
    due_s = np.arange(100) / 100
    found = outcome(due_s, due_s + 0.02, due_s + 0.021).summary()
    assert found["generator_lag_p99_ms"] == pytest.approx(20)
    assert not found["kept_up"]
    assert outcome(due_s, due_s, due_s + 0.001).summary()["kept_up"]


def test_the_warm_up_is_left_out() -> None:
    """By when requests were due."""
    found = outcome([0, 1, 2, 3], [0, 1, 2, 3], [5, 1.5, 2.25, 3.25]).after(2.0)
    assert found.summary()["requests"] == 2
    assert found.latencies_s.tolist() == [0.25, 0.25]
