"""The JSON documents that describe the server and its models, as OIP and Triton clients read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from serving import __version__
from serving.gateway.model import Lane, ServedModel
from serving.gateway.routes import PROCESS_PREFIX, VERSION
from serving.observe.snapshot import Family
from serving.tensors import Array, Signature, Tensors, TensorSpec

Document = dict[str, Any]

_NS_PER_S = 1_000_000_000


def server_metadata() -> Document:
    """`GET /v2`."""
    return {"name": "halftone", "version": __version__, "extensions": ["binary_tensor_data", "statistics"]}


def index(models: Iterable[ServedModel]) -> Document:
    """`GET /`: where to look."""
    return {
        **server_metadata(),
        "models": [f"/v2/models/{model.name}" for model in models],
        "health": "/v2/health/ready",
        "metrics": "/metrics",
        "metrics_of_each_process": "/metrics/processes",
        "openapi": "/openapi.json",
    }


def metrics_targets(address: str, processes: Iterable[str]) -> list[Document]:
    """`GET /metrics/processes`: Prometheus' HTTP service discovery, a target for each process.

    Args:
        address: where the server answers; all targets share it, and are told apart by their path.
        processes: those that live.
    """
    return [
        {
            "targets": [address],
            "labels": {"__metrics_path__": PROCESS_PREFIX + process, "instance": process},
        }
        for process in processes
    ]


def model_metadata(model: ServedModel, signature: Signature) -> Document:
    """`GET /v2/models/{m}`: the signature, and every tier with the precision it measured."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": "halftone_pytorch",
        "inputs": [_tensor(spec) for spec in signature.inputs],
        "outputs": [_tensor(spec) for spec in signature.outputs],
        "default": model.config.default or model.table.default.tier,
        "classes": {name: rule.tier for name, rule in model.config.classes.items()},
        "tiers": {name: _tier(lane) for name, lane in model.lanes.items()},
    }


def _tensor(spec: TensorSpec) -> Document:
    document: Document = {"name": spec.name, "datatype": spec.dtype, "shape": list(spec.shape)}
    return document if spec.kind is None else {**document, "kind": spec.kind}


def _tier(lane: Lane) -> Document:
    description = lane.description
    document: Document = {"kind": lane.kind, "replicas": lane.config.replicas, "ready": lane.is_ready}
    if description is None:
        return document
    if description.unavailable is not None:
        return {**document, "unavailable": description.unavailable}
    return {
        **document,
        "device": description.device,
        "soc": description.soc,
        "effective": description.effective,
        "kept_fp32": list(description.kept_fp32),
        "weight_losses": list(description.weight_losses),
        "measured": dict(description.measured),
        "switches": dict(description.switches),
    }


def measured_precision(model: ServedModel) -> Document:
    """`GET /v2/models/{m}/precision`: each tier's divergence, state and reason; the floor; the budget."""
    config = model.config.divergence
    document: Document = {
        "model": model.name,
        "reference": model.table.reference,
        "sample": config.sample,
        "budget": {
            "metric": config.metric,
            "limit": config.budget,
            "quantile": config.quantile,
            "window": config.window,
            "min_samples": config.enough_samples,
        },
        "floor": {},
        "tiers": {},
    }
    if model.precision is None:
        return document
    for tier in model.lanes:
        if tier == model.precision.reference:
            document["tiers"][tier] = {"state": "serving", "reason": "the reference"}
            continue
        known = model.precision.standing(tier)
        document["floor"] = {metric: _or_null(value) for metric, value in known.floor.items()}
        document["tiers"][tier] = {
            "state": known.state,
            "reason": known.reason,
            "by_hand": known.is_held,
            "samples": known.samples,
            "budget_ratio": _or_null(known.ratio),
            "quantiles": {metric: _or_null(found.quantile) for metric, found in known.metrics.items()},
            "bounds": {metric: _or_null(found.bound) for metric, found in known.metrics.items()},
        }
    return document


def _or_null(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def example_request(signature: Signature, example: Tensors) -> Document:
    """`GET /v2/models/{m}/example`: a request body to post to `/infer` as it is."""
    return {
        "inputs": [
            {
                "name": spec.name,
                "datatype": spec.dtype,
                "shape": list(example[spec.name].shape),
                "data": _json_data(spec, example[spec.name]),
            }
            for spec in signature.inputs
        ]
    }


def _json_data(spec: TensorSpec, array: Array) -> list[object]:
    values: list[object] = array.reshape(-1).tolist()
    if spec.dtype == "BYTES":
        return [value.decode(errors="replace") if isinstance(value, bytes) else value for value in values]
    return values


def triton_config(model: ServedModel, signature: Signature) -> Document:
    """`GET /v2/models/{m}/config`, in the fields of Triton's ModelConfig."""
    batch = max(lane.config.batching.max_rows for lane in model.lanes.values())
    return {
        "name": model.name,
        "platform": "halftone_pytorch",
        "backend": "halftone",
        "max_batch_size": batch,
        "input": [_triton_tensor(spec) for spec in signature.inputs],
        "output": [_triton_tensor(spec) for spec in signature.outputs],
        "instance_group": [
            {"name": tier, "count": lane.config.replicas} for tier, lane in model.lanes.items()
        ],
    }


def _triton_tensor(spec: TensorSpec) -> Document:
    dtype = "TYPE_STRING" if spec.dtype == "BYTES" else f"TYPE_{spec.dtype}"
    # With batching, Triton leaves the first dimension out.
    return {"name": spec.name, "data_type": dtype, "dims": list(spec.shape[1:])}


def repository_index(models: Iterable[ServedModel]) -> list[Document]:
    """`POST /v2/repository/index`."""
    return [
        {
            "name": model.name,
            "version": VERSION,
            "state": "UNAVAILABLE" if model.problems else "READY",
            "reason": "; ".join(f"{tier}: {reason}" for tier, reason in model.problems.items()),
            "problems": model.problems,
        }
        for model in models
    ]


def triton_statistics(model: str, families: Iterable[Family]) -> Document:
    """`GET /v2/models/{m}/stats`: Triton's statistics, from the merged metrics of all processes."""
    totals = _totals(model, families)
    requests = totals["halftone_request_duration_seconds_count"]
    failures = totals["failures"]
    zero = {"count": 0, "ns": 0}
    return {
        "model_stats": [
            {
                "name": model,
                "version": VERSION,
                "inference_count": int(totals["halftone_rows_total"]),
                "execution_count": int(totals["halftone_compute_duration_seconds_count"]),
                "inference_stats": {
                    "success": {
                        "count": int(totals["successes"]),
                        "ns": int(totals["halftone_request_duration_seconds_sum"] * _NS_PER_S),
                    },
                    "fail": {"count": int(failures), "ns": 0},
                    "queue": _duration(totals, "halftone_queue_duration_seconds"),
                    "compute_input": zero,
                    "compute_infer": _duration(totals, "halftone_compute_duration_seconds"),
                    "compute_output": zero,
                },
                "batch_stats": [],
                "request_count": int(requests),
            }
        ]
    }


def _duration(totals: Mapping[str, float], name: str) -> Document:
    return {"count": int(totals[f"{name}_count"]), "ns": int(totals[f"{name}_sum"] * _NS_PER_S)}


class _Totals(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return 0.0


def _totals(model: str, families: Iterable[Family]) -> _Totals:
    """Sample name -> the sum over the model's tiers; requests apart by success."""
    totals = _Totals()
    for family in families:
        for (name, labels), value in family.samples.items():
            found = dict(labels)
            if found.get("model") != model:
                continue
            totals[name] += value
            if name == "halftone_requests_total":
                totals["successes" if found["code"] == "200" else "failures"] += value
    return totals
