"""The documents that describe server and models, as clients of OIP and Triton read them."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from serving import __version__
from serving.gateway import descriptions
from serving.observe.metrics import DURATION_BUCKETS_S, GatewayMetrics
from serving.observe.snapshot import take_snapshot
from serving.tensors import DTYPES, Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(TensorSpec("text", "BYTES", (-1,)), TensorSpec("ids", "INT64", (-1, 4))),
    outputs=(TensorSpec("y", "FP32", (-1, 10), "logits"),),
)


def test_the_servers_metadata() -> None:
    """Name, version, extensions."""
    document = descriptions.server_metadata()
    assert document["version"] == __version__
    assert "binary_tensor_data" in document["extensions"]


def test_the_index_links_to_every_model(gateway: Any) -> None:
    """What `/` shows."""
    assert descriptions.index([gateway.model])["models"] == ["/v2/models/m"]


def test_a_models_metadata_tells_each_tiers_measured_precision(gateway: Any) -> None:
    """And the classes that lead to it."""
    gateway.model.lanes["fp16"].description = replace(
        gateway.tiers["fp16"].description, kept_fp32=("head",), weight_losses=("a.b: 3 become inf",)
    )
    document = descriptions.model_metadata(gateway.model, SIGNATURE)
    assert document["inputs"][1] == {"name": "ids", "datatype": "INT64", "shape": [-1, 4]}
    assert document["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 10], "kind": "logits"}]
    assert document["default"] == "standard"
    assert document["classes"] == {"critical": "fp32", "standard": "fp16"}
    assert document["tiers"]["fp32"]["effective"] == "fp32-measured"
    assert document["tiers"]["fp16"]["kept_fp32"] == ["head"]
    assert document["tiers"]["fp16"]["weight_losses"] == ["a.b: 3 become inf"]
    json.dumps(document)


def test_a_loading_tier_is_described_by_what_is_configured(make_gateway: Any) -> None:
    """Nothing is known of its device yet."""
    document = descriptions.model_metadata(make_gateway(is_open=False).model, SIGNATURE)
    assert document["tiers"]["fp32"] == {"kind": "fp32", "replicas": 1, "ready": False}


def test_an_example_can_be_posted_as_it_is() -> None:
    """Flat data; strings as text."""
    example = {
        "text": np.array([b"caf\xc3\xa9", b"\xff"], object),
        "ids": np.arange(8).reshape(2, 4),
    }
    document = descriptions.example_request(SIGNATURE, example)
    assert document["inputs"] == [
        {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["café", "\N{REPLACEMENT CHARACTER}"]},
        {"name": "ids", "datatype": "INT64", "shape": [2, 4], "data": [0, 1, 2, 3, 4, 5, 6, 7]},
    ]
    json.dumps(document)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_tritons_config_has_tritons_type_names(dtype: str, gateway: Any) -> None:
    """Without the batch dimension; `TYPE_STRING` for BYTES."""
    signature = Signature((TensorSpec("x", dtype, (-1, 3)),), SIGNATURE.outputs)
    (tensor,) = descriptions.triton_config(gateway.model, signature)["input"]
    assert tensor["dims"] == [3]
    assert tensor["data_type"] == ("TYPE_STRING" if dtype == "BYTES" else f"TYPE_{dtype}")


def test_tritons_config_tells_the_largest_batch_and_the_replicas(make_gateway: Any) -> None:
    """Of all tiers."""
    model = {"tiers": {"fp32": {"batching": {"max_rows": 8}}, "fp16": {"replicas": 3}}}
    document = descriptions.triton_config(make_gateway(model=model).model, SIGNATURE)
    assert document["max_batch_size"] == 32
    assert document["instance_group"] == [{"name": "fp32", "count": 1}, {"name": "fp16", "count": 3}]


def test_the_repository_index_tells_what_does_not_answer(gateway: Any) -> None:
    """READY, or UNAVAILABLE with a reason for each tier."""
    (entry,) = descriptions.repository_index([gateway.model])
    assert (entry["state"], entry["reason"]) == ("READY", "")
    gateway.model.lanes["fp16"].description = replace(gateway.tiers["fp16"].description, failure="broken")
    (entry,) = descriptions.repository_index([gateway.model])
    assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "fp16: broken")
    assert entry["problems"] == {"fp16": "broken"}


def test_tritons_statistics_are_sums_over_the_models_tiers() -> None:
    """Of this model only; durations in whole nanoseconds."""
    metrics = GatewayMetrics(CollectorRegistry())
    for tier, code in (("fp32", "200"), ("fp16", "200"), ("fp16", "503")):
        metrics.requests.labels("m", tier, code).inc()
        metrics.request_duration.series(("m", tier), DURATION_BUCKETS_S).observe(0.5)
    metrics.rows.labels("m", "fp32").inc(7)
    metrics.compute_duration.labels("m", "fp32").observe(0.25)
    metrics.queue_duration.series(("m", "fp16"), DURATION_BUCKETS_S).observe(0.125)
    metrics.requests.labels("n", "fp32", "200").inc(100)
    metrics.rows.labels("n", "fp32").inc(100)
    document = descriptions.triton_statistics("m", take_snapshot(metrics.registry))
    (stats,) = document["model_stats"]
    assert (stats["inference_count"], stats["execution_count"], stats["request_count"]) == (7, 1, 3)
    assert stats["inference_stats"]["success"] == {"count": 2, "ns": 1_500_000_000}
    assert stats["inference_stats"]["fail"]["count"] == 1
    assert stats["inference_stats"]["compute_infer"] == {"count": 1, "ns": 250_000_000}
    assert stats["inference_stats"]["queue"] == {"count": 1, "ns": 125_000_000}


def test_statistics_of_a_model_without_traffic_are_zero() -> None:
    """Not missing."""
    (stats,) = descriptions.triton_statistics("m", ())["model_stats"]
    assert stats["request_count"] == 0
    assert stats["inference_stats"]["success"] == {"count": 0, "ns": 0}
