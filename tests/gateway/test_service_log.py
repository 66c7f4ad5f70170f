"""What a request leaves in the log, in the reply and beside its bucket."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from serving.observe.logs import FIELDS
from serving.observe.snapshot import take_snapshot

Run = Callable[..., Any]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the requests' lines."""
    return [getattr(record, FIELDS) for record in caplog.records if record.name == "halftone.request"]


def test_an_answered_request_has_a_line(
    gateway: Any, run_virtually: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Its id, tier, reason, status, duration and trace; the trace comes back in the reply."""

    async def scenario() -> None:
        reply = await gateway.infer(
            ("X-Request-Id", "r-7"), ("traceparent", TRACEPARENT), ("X-Precision", "fp16")
        )
        assert ("traceparent", TRACEPARENT) in reply.headers

    with caplog.at_level(logging.INFO, "halftone.request"):
        run_virtually(scenario)
    (line,) = lines(caplog)
    assert line.pop("duration_ms") >= 0
    assert line == {
        "request_id": "r-7",
        "model": "m",
        "tier": "fp16",
        "reason": "tier",
        "status": 200,
        "trace_id": TRACE_ID,
    }


def test_a_refused_request_has_one_line_with_its_code(
    gateway: Any, run_virtually: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever of it was known; an invalid trace is not passed on."""

    async def scenario() -> None:
        reply = await gateway.infer(("X-Precision", "nope"), ("traceparent", "nonsense"))
        assert reply.status == 400
        assert "traceparent" not in dict(reply.headers)

    with caplog.at_level(logging.INFO, "halftone.request"):
        run_virtually(scenario)
    (line,) = lines(caplog)
    assert (line["status"], line["code"], line["tier"]) == (400, "bad_precision", "none")
    assert "trace_id" not in line


def test_when_busy_only_some_requests_have_one(
    gateway: Any, run_virtually: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 300 at one moment, about a second's worth."""

    async def scenario() -> None:
        for _ in range(300):
            assert (await gateway.infer()).status == 200

    with caplog.at_level(logging.INFO, "halftone.request"):
        run_virtually(scenario)
    assert 1 <= len(lines(caplog)) <= 100


def test_a_sampled_request_stands_beside_its_bucket(gateway: Any, run_virtually: Run) -> None:
    """By its id and trace, once in the histogram of durations."""

    async def scenario() -> None:
        await gateway.infer(("X-Request-Id", "r-7"), ("traceparent", TRACEPARENT))

    run_virtually(scenario)
    families = {family.name: family for family in take_snapshot(gateway.metrics.registry)}
    (exemplar,) = families["halftone_request_duration_seconds"].exemplars.values()
    assert exemplar.labels == (("request_id", "r-7"), ("trace_id", TRACE_ID))


@pytest.mark.parametrize("hostile", ["two words", 'quo"te', "x" * 100])
def test_a_hostile_id_stands_beside_none(gateway: Any, run_virtually: Run, hostile: str) -> None:
    """It is a request id all the same."""

    async def scenario() -> None:
        reply = await gateway.infer(("X-Request-Id", hostile))
        assert dict(reply.headers)["x-request-id"] == hostile

    run_virtually(scenario)
    families = {family.name: family for family in take_snapshot(gateway.metrics.registry)}
    assert families["halftone_request_duration_seconds"].exemplars == {}


def test_a_line_names_the_caller_and_not_the_token(
    make_gateway: Any, run_virtually: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """By the name that stands beside the token; a refused caller has none."""
    token = "0123456789abcdef"  # noqa: S105  A test's.

    async def scenario() -> None:
        gateway = make_gateway(tokens={"alice": token})
        assert (await gateway.infer(("Authorization", f"Bearer {token}"))).status == 200
        assert (await gateway.infer(("Authorization", f"Bearer {token}x"))).status == 401

    with caplog.at_level(logging.INFO, "halftone.request"):
        run_virtually(scenario)
    answered, refused = lines(caplog)
    assert answered["caller"] == "alice"
    assert "caller" not in refused
    assert token not in str([answered, refused])
