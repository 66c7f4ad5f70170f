"""`/metrics` on a running server: one page for all gateways, its totals those of the requests sent."""

from __future__ import annotations

import time
from collections.abc import Callable

import client
import numpy as np
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess

ECHO = "/v2/models/echo/infer"
CONTRACT = {
    "halftone_requests": ("counter", {"model", "tier", "code"}),
    "halftone_request_duration_seconds": ("histogram", {"model", "tier", "le"}),
    "halftone_queue_duration_seconds": ("histogram", {"model", "tier", "le"}),
    "halftone_compute_duration_seconds": ("histogram", {"model", "tier", "le"}),
    "halftone_rows": ("counter", {"model", "tier"}),
    "halftone_batch_rows": ("histogram", {"model", "tier", "le"}),
    "halftone_batch_elements": ("counter", {"model", "tier", "kind"}),
    "halftone_batches": ("counter", {"model", "tier", "via"}),
    "halftone_queue_rows": ("gauge", {"model", "tier"}),
    "halftone_inflight_rows": ("gauge", {"model", "tier"}),
    "halftone_routed": ("counter", {"model", "declared", "tier", "reason"}),
    "halftone_rejected": ("counter", {"model", "tier", "reason"}),
    "halftone_escalated_rows": ("counter", {"model", "tier", "cause"}),
    "halftone_shadow_rows": ("counter", {"model", "tier", "outcome"}),
    "halftone_divergence": ("histogram", {"model", "tier", "output", "metric", "le"}),
    "halftone_divergence_floor": ("histogram", {"model", "output", "metric", "le"}),
    "halftone_divergence_verdict": ("counter", {"model", "tier", "output", "verdict"}),
    "halftone_divergence_nonfinite": ("counter", {"model", "tier", "output"}),
    "halftone_top1_disagreement": ("counter", {"model", "tier", "output"}),
    "halftone_top5_disagreement": ("counter", {"model", "tier", "output"}),
    "halftone_twin_rows": ("counter", {"model", "outcome"}),
    "halftone_budget_state": ("gauge", {"model", "tier", "state"}),
    "halftone_budget_ratio": ("gauge", {"model", "tier"}),
    "halftone_budget_limit": ("gauge", {"model", "tier", "metric"}),
    "halftone_budget_allowed_share": ("gauge", {"model", "tier"}),
    "halftone_budget_exceeded_rows": ("counter", {"model", "tier"}),
    "halftone_device_memory_bytes": ("gauge", {"model", "tier", "kind"}),
    "halftone_replicas": ("gauge", {"model", "tier", "state"}),
    "halftone_replicas_configured": ("gauge", {"model", "tier"}),
    "halftone_replica_restarts": ("counter", {"model", "tier"}),
    "halftone_tier_info": ("gauge", {"model", "tier", "device", "soc", "effective"}),
    "halftone_build_info": ("gauge", {"version", "torch", "torch_npu", "ray"}),
}


def samples(server: ServerProcess) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the page, by name and labels."""
    page = server.call("GET", "/metrics").body.decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def total(server: ServerProcess, name: str, **labels: str) -> float:
    """The sum of the samples of that name that carry these labels."""
    return sum(
        value
        for (sample, found), value in samples(server).items()
        if sample == name and labels.items() <= dict(found).items()
    )


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether the condition comes true in time: another gateway's figures travel with its beat."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def settle() -> None:
    """Let both gateways' beats pass: what was asked before is on the page."""
    time.sleep(1.2)


def test_every_metric_has_its_type_and_labels(server: ServerProcess) -> None:
    """Names, types and labels of the contract; nothing else under our prefix."""
    server.call("POST", ECHO, b"{")
    server.call("POST", ECHO, client.infer_body("x", np.ones((1, 128))))
    settle()
    page = server.call("GET", "/metrics").body.decode()
    found = {family.name: family for family in text_string_to_metric_families(page)}
    assert set(found) == set(CONTRACT)
    for name, (kind, labels) in CONTRACT.items():
        assert found[name].type == kind
        seen = {label for sample in found[name].samples for label in sample.labels}
        # What was not sampled for comparison, or never overflowed, has no series yet.
        assert seen == labels or not seen, name


def test_batches_go_to_their_replica_directly(server: ServerProcess) -> None:
    """The Serve handle is for the times when no replica is connected."""

    def sent(via: str) -> float:
        return total(server, "halftone_batches_total", model="echo", tier="fp32", via=via)

    settle()
    before = {via: sent(via) for via in ("direct", "serve")}
    for _ in range(20):
        answer = server.call("POST", ECHO, client.infer_body("x", np.ones((1, 128))), x_precision="fp32")
        assert answer.status == 200
    settle()
    assert sent("direct") == before["direct"] + 20
    assert sent("serve") == before["serve"]


def test_requests_of_all_gateways_are_counted_once(server: ServerProcess) -> None:
    """Requests over many connections reach both gateways; the totals are what was sent."""
    body = client.infer_body("x", np.ones((3, 128)))
    settle()
    before = {
        name: total(server, name, model="echo", tier="fp32")
        for name in ("halftone_requests_total", "halftone_rows_total")
    }
    labels = {"model": "echo", "declared": "critical", "reason": "class=critical"}
    routed = total(server, "halftone_routed_total", **labels)
    for _ in range(40):
        assert server.call("POST", ECHO, body, x_precision="critical").status == 200
    assert wait_for(
        lambda: (
            total(server, "halftone_requests_total", model="echo", tier="fp32", code="200")
            >= before["halftone_requests_total"] + 40
        )
    )
    assert total(server, "halftone_requests_total", model="echo", tier="fp32") == (
        before["halftone_requests_total"] + 40
    )
    assert total(server, "halftone_rows_total", model="echo", tier="fp32") == (
        before["halftone_rows_total"] + 120
    )
    assert total(server, "halftone_routed_total", **labels) == routed + 40


def test_refusals_are_counted_by_reason(server: ServerProcess) -> None:
    """By error code, and unknown models under `other`."""

    def refused() -> tuple[float, float]:
        return (
            total(server, "halftone_rejected_total", model="echo", reason="bad_precision"),
            total(server, "halftone_requests_total", model="other", code="404"),
        )

    settle()
    before = refused()
    server.call("POST", ECHO, client.infer_body("x", np.ones((1, 128))), x_precision="nope")
    server.call("POST", "/v2/models/nobody/infer", b"{}")
    assert wait_for(lambda: refused() == (before[0] + 1, before[1] + 1))


def test_tier_info_names_what_was_measured(server: ServerProcess) -> None:
    """One series a tier, whatever the number of gateways, with the probe's verdict."""
    found = {
        (dict(labels)["model"], dict(labels)["tier"]): (dict(labels)["effective"], value)
        for (name, labels), value in samples(server).items()
        if name == "halftone_tier_info"
    }
    assert found["text", "fp32"] == ("fp32-ieee", 1.0)
    assert found["text", "mixed"] == ("fp16-emulated", 1.0)
    assert len(found) == 9


def test_gauges_return_to_zero(server: ServerProcess) -> None:
    """Nothing is queued or in flight when nobody asks."""
    assert wait_for(lambda: total(server, "halftone_queue_rows") == 0)
    assert wait_for(lambda: total(server, "halftone_inflight_rows") == 0)


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=1.0.0", "text/plain"])
def test_the_format_is_negotiated(server: ServerProcess, accept: str) -> None:
    """OpenMetrics on request, the classic text format otherwise."""
    reply = server.call("GET", "/metrics", accept=accept)
    assert reply.headers["content-type"].startswith(accept.partition(";")[0])
    if "openmetrics" in accept:
        assert list(openmetrics.text_string_to_metric_families(reply.body.decode()))
