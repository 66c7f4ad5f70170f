"""Lanes and served models: what is ready, and what a request is told until it is."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from serving.errors import NotReady, PrecisionUnavailable
from serving.gateway.model import LOADING


def test_a_model_is_loading_until_its_tiers_report(make_gateway: Any) -> None:
    """No signature, no queue, and a reason for every tier."""
    model = make_gateway(is_open=False).model
    assert model.problems == {"fp32": LOADING, "fp16": LOADING}
    with pytest.raises(NotReady, match="model m is still loading"):
        model.ready_signature()
    with pytest.raises(NotReady, match="tier fp32 of m is still loading"):
        model.lanes["fp32"].ready_coalescer()


def test_an_open_model_is_ready(gateway: Any) -> None:
    """Signature, example, queues."""
    model = gateway.model
    assert model.problems == {}
    assert model.ready_signature() == gateway.source.signature
    coalescer, description = model.lanes["fp16"].ready_coalescer()
    assert coalescer.queue_rows == 0
    assert description.effective == "fp16-measured"


def test_a_failed_tier_leaves_the_others_ready(gateway: Any) -> None:
    """Its callers are told where the reason stands; the reason itself may be long."""
    lane = gateway.model.lanes["fp16"]
    lane.description = replace(lane.description, failure="weights of another hash")
    assert gateway.model.problems == {"fp16": "weights of another hash"}
    with pytest.raises(NotReady, match="failed to start; /v2/health/ready says why"):
        lane.ready_coalescer()
    gateway.model.lanes["fp32"].ready_coalescer()


def test_a_tier_that_the_device_cannot_honour_is_no_fault(gateway: Any) -> None:
    """Its callers get the reason; the model is ready for the others."""
    lane = gateway.model.lanes["fp16"]
    lane.description = replace(lane.description, unavailable="A 910A has no BF16.")
    assert gateway.model.problems == {}
    assert not lane.is_ready
    with pytest.raises(PrecisionUnavailable, match="no BF16"):
        lane.ready_coalescer()
    assert gateway.model.lanes["fp32"].is_ready


def test_the_queues_limits_are_the_configured_ones(make_gateway: Any) -> None:
    """Milliseconds become seconds."""
    tier = {"batching": {"max_rows": 7, "max_wait_ms": 3}, "max_queue_rows": 99, "replicas": 2}
    coalescer, _ = make_gateway(tier=tier).model.lanes["fp32"].ready_coalescer()
    limits = coalescer._limits
    assert (limits.max_rows, limits.max_wait_s, limits.max_queue_rows, limits.replicas) == (7, 0.003, 99, 2)


def test_only_a_source_with_its_own_preprocessing_preprocesses(make_gateway: Any) -> None:
    """For the others a request never leaves the event loop."""
    plain = make_gateway()
    assert not plain.model.preprocesses

    class Preprocessing(type(plain.source)):  # type: ignore[misc]
        def preprocess(self, inputs: Any) -> Any:
            return inputs

    assert make_gateway(source=Preprocessing()).model.preprocesses


def test_lane_metrics_are_bound_to_model_and_tier(gateway: Any) -> None:
    """What a coalescer reports arrives under its own labels."""
    metrics = gateway.model.lanes["fp32"].metrics
    metrics.follow(SimpleNamespace(queue_rows=3, inflight_rows=2))
    metrics.started(0.25)
    metrics.batch(2, 0.5)
    metrics.padded(6, 2)
    here = {"model": "m", "tier": "fp32"}
    assert gateway.counted("halftone_queue_rows", **here) == 3
    assert gateway.counted("halftone_inflight_rows", **here) == 2
    assert gateway.counted("halftone_queue_duration_seconds_sum", **here) == 0.25
    assert gateway.counted("halftone_compute_duration_seconds_sum", **here) == 0.5
    assert gateway.counted("halftone_rows_total", **here) == 2
    assert gateway.counted("halftone_batch_rows_sum", **here) == 2
    assert gateway.counted("halftone_rows_total", model="m", tier="fp16") == 0
    assert gateway.counted("halftone_batch_elements_total", kind="own", **here) == 4
    assert gateway.counted("halftone_batch_elements_total", kind="padding", **here) == 2
