"""Requests' lines: at most one each, by rate, with the caller's trace."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.observe.logs import FIELDS
from serving.observe.request_log import Rate, RequestLog, exemplar_of, parse_traceparent

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=500))
def test_the_rate_holds_over_any_second(pauses_s: list[float]) -> None:
    """At most one second's worth beyond it after a pause, and nothing is lost count of."""
    rate, now_s, taken_s, skipped = Rate(10), 100.0, [], 0
    for pause_s in pauses_s:
        now_s += pause_s
        if rate.take(now_s):
            taken_s.append(now_s)
            skipped += rate.skipped
            rate.skipped = 0
    for start_s in taken_s:
        assert sum(start_s <= moment_s < start_s + 1 for moment_s in taken_s) <= 21
    assert len(taken_s) + skipped + rate.skipped == len(pauses_s)
    assert taken_s[0] == 100.0 + pauses_s[0]


def test_a_line_says_how_many_had_none(caplog: pytest.LogCaptureFixture) -> None:
    """And leaves out what is not known."""
    log = RequestLog(lines_per_s=1)
    with caplog.at_level(logging.INFO, "halftone.request"):
        for now_s in (10.0, 10.1, 10.2, 12.0):
            if log.wants_answer(now_s):
                log.write({"tier": "fp16", "code": None}, refused=False)
    fields = [getattr(record, FIELDS) for record in caplog.records]
    assert fields[0] == {"tier": "fp16"}
    assert fields[-1]["tier"] == "fp16"
    assert len(fields) + sum(found.get("skipped", 0) for found in fields) == 4


def test_refusals_have_a_rate_of_their_own() -> None:
    """A flood of answers hides no refusal."""
    log = RequestLog(lines_per_s=1)
    assert not all(log.wants_answer(10.0) for _ in range(10))
    assert log.wants_refusal(10.0)


def test_a_valid_trace_is_known() -> None:
    """As W3C Trace Context has it."""
    trace = parse_traceparent(TRACEPARENT)
    assert trace is not None
    assert (trace.trace_id, trace.traceparent) == (TRACE_ID, TRACEPARENT)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        TRACEPARENT.upper(),
        TRACEPARENT + "\n",
        f"ff-{TRACE_ID}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}-b7ad6b7169203331-01",
    ],
)
def test_anything_else_is_no_trace(header: str | None) -> None:
    """It is not passed on."""
    assert parse_traceparent(header) is None


def test_an_exemplar_holds_plain_ids_only() -> None:
    """Within what OpenMetrics allows: 128 characters, names and values together."""
    trace = parse_traceparent(TRACEPARENT)
    longest = exemplar_of("a" * 64, trace)
    assert longest == {"trace_id": TRACE_ID, "request_id": "a" * 64}
    assert sum(len(name) + len(value) for name, value in longest.items()) <= 128
    assert exemplar_of("two words", trace) == {"trace_id": TRACE_ID}
    for hostile in ('a"b', "a\nb", "ü", "a" * 65, ""):
        assert exemplar_of(hostile, None) is None
