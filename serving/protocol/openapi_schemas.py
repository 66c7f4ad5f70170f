"""JSON Schemas of the documents that the HTTP interface takes and gives.

A reply may hold more than its schema names, and clients ignore what they don't know; what is
named as required is always there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.tensors import DTYPES, FREE, OUTPUT_KINDS, Signature, TensorSpec, element_count

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
FLAG: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 0}
#: An example with more elements would fill the document.
_MAX_EXAMPLE_ELEMENTS = 1024


def object_of(properties: Json | None = None, **keywords: Any) -> Json:
    """An object with these properties."""
    return {"type": "object", **({"properties": properties} if properties else {}), **keywords}


def reference_to(name: str) -> Json:
    """A schema among the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def server_metadata_schema() -> Json:
    """What `GET /v2` answers."""
    return _all_of({"name": TEXT, "version": TEXT, "extensions": _list_of(TEXT)})


def ready_schema(name: str) -> Json:
    """What the health routes answer when all is well."""
    return _all_of({name: {"const": True}})


def repository_schema() -> Json:
    """What `POST /v2/repository/index` answers."""
    model = {"name": TEXT, "version": TEXT, "state": {"enum": ["READY", "UNAVAILABLE"]}, "reason": TEXT}
    return _list_of(_all_of({**model, "problems": object_of(additionalProperties=TEXT)}))


def targets_schema() -> Json:
    """What `GET /metrics/processes` answers: Prometheus' HTTP service discovery."""
    return _list_of(_all_of({"targets": _list_of(TEXT), "labels": object_of(additionalProperties=TEXT)}))


def metadata_schema() -> Json:
    """What `GET /v2/models/{m}` answers."""
    tensor = {"name": TEXT, "datatype": {"enum": list(DTYPES)}, "shape": _list_of({"type": "integer"})}
    inputs = _list_of(_all_of(tensor))
    output = object_of({**tensor, "kind": {"enum": list(OUTPUT_KINDS)}}, required=list(tensor))
    always = {"kind": TEXT, "replicas": {"type": "integer", "minimum": 1}, "ready": FLAG}
    facts = object_of(additionalProperties=TEXT)
    loaded = {
        **dict.fromkeys(("unavailable", "device", "soc", "effective"), TEXT),
        "kept_fp32": {"type": "array"},
        "weight_losses": {"type": "array"},
        "measured": facts,
        "switches": facts,
    }
    tier = object_of({**always, **loaded}, required=list(always))
    return _all_of(
        {
            "name": TEXT,
            "versions": _list_of(TEXT),
            "platform": TEXT,
            "inputs": inputs,
            "outputs": _list_of(output),
            "default": TEXT,
            "classes": object_of(additionalProperties=TEXT),
            "tiers": object_of(additionalProperties=tier),
        }
    )


def configuration_schema() -> Json:
    """What `GET /v2/models/{m}/config` answers: fields of Triton's ModelConfig."""
    tensors = _list_of(_all_of({"name": TEXT, "data_type": TEXT, "dims": _list_of({"type": "integer"})}))
    group = _all_of({"name": TEXT, "count": COUNT})
    names = {"name": TEXT, "platform": TEXT, "backend": TEXT, "max_batch_size": COUNT}
    return _all_of({**names, "input": tensors, "output": tensors, "instance_group": _list_of(group)})


def statistics_schema() -> Json:
    """What `GET /v2/models/{m}/stats` answers: Triton's statistics."""
    durations = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    counts = dict.fromkeys(("inference_count", "execution_count", "request_count"), COUNT)
    model = {
        "name": TEXT,
        "version": TEXT,
        **counts,
        "inference_stats": _all_of({name: _all_of({"count": COUNT, "ns": COUNT}) for name in durations}),
        "batch_stats": {"type": "array"},
    }
    return _all_of({"model_stats": {**_list_of(_all_of(model)), "minItems": 1, "maxItems": 1}})


def precision_schema() -> Json:
    """What `GET /v2/models/{m}/precision` answers."""
    figure = {"type": ["number", "null"], "description": "null where it is not known, or infinite."}
    figures = object_of(additionalProperties=figure)
    tier = object_of(
        {
            "state": {"enum": ["serving", "tripped", "probing"]},
            "reason": TEXT,
            "by_hand": FLAG,
            "samples": COUNT,
            "budget_ratio": figure,
            "quantiles": figures,
            "bounds": figures,
        },
        required=["state", "reason"],
    )
    budget = {name: {"type": "number"} for name in ("limit", "quantile", "window", "min_samples")}
    return object_of(
        {
            "model": TEXT,
            "reference": {"type": ["string", "null"]},
            "sample": {"type": "number"},
            "budget": object_of({"metric": TEXT, **budget}),
            "floor": figures,
            "tiers": object_of(additionalProperties=tier),
        },
        required=["model", "reference", "budget", "floor", "tiers"],
    )


def protocol_schemas() -> Json:
    """The Open Inference Protocol's own documents, and the one of every error."""
    scalar = {"type": ["string", "number", "boolean", "null"]}
    parameters = object_of(additionalProperties=scalar)
    tensor = {
        "name": TEXT,
        "datatype": {"enum": list(DTYPES)},
        "shape": {"type": "array", "items": COUNT, "minItems": 1},
        "parameters": parameters,
        "data": {"type": "array", "description": "Row-major, flat or nested; absent where sent in binary."},
    }
    output = object_of({"name": TEXT, "parameters": parameters}, required=["name"])
    head: Json = {"id": {"type": "string", "maxLength": 128}, "parameters": parameters}
    tensors = _list_of(reference_to("Tensor"))
    named = {"model_name": TEXT, "model_version": TEXT}
    slug = {"type": "string", "description": "What went wrong, for programs."}
    return {
        "Error": _all_of({"error": TEXT, "code": slug, "id": TEXT}),
        "Tensor": object_of(tensor, required=["name", "datatype", "shape"]),
        "InferRequest": object_of(
            {**head, "inputs": tensors, "outputs": _list_of(output)}, required=["inputs"]
        ),
        "InferResponse": object_of(
            {**named, **head, "outputs": tensors}, required=["model_name", "model_version", "outputs"]
        ),
    }


def model_schemas(models: Mapping[str, Signature]) -> Json:
    """Each model's inputs and outputs, for readers and for generated clients."""
    return {
        f"model.{name}": object_of(
            {
                "inputs": {"type": "array", "prefixItems": [_tensor_schema(s) for s in signature.inputs]},
                "outputs": {"type": "array", "prefixItems": [_tensor_schema(s) for s in signature.outputs]},
            }
        )
        for name, signature in sorted(models.items())
    }


def request_examples(models: Mapping[str, Signature]) -> Json:
    """A request of one row of zeros for each model that JSON can carry, unless it would be long."""
    return {
        name: {"value": {"inputs": [_example_tensor(spec) for spec in signature.inputs]}}
        for name, signature in sorted(models.items())
        if all(spec.dtype != "FP16" for spec in signature.inputs)
        and sum(element_count(_one_row(spec)) for spec in signature.inputs) <= _MAX_EXAMPLE_ELEMENTS
    }


def _tensor_schema(spec: TensorSpec) -> Json:
    sizes: list[Json] = [{"type": "integer", "minimum": 1} if n == FREE else {"const": n} for n in spec.shape]
    shape: Json = {"type": "array", "prefixItems": sizes, "minItems": len(sizes), "maxItems": len(sizes)}
    return object_of({"name": {"const": spec.name}, "datatype": {"const": spec.dtype}, "shape": shape})


def _one_row(spec: TensorSpec) -> list[int]:
    return [1 if size == FREE else size for size in spec.shape]


def _example_tensor(spec: TensorSpec) -> Json:
    shape = _one_row(spec)
    zero: object = {"BYTES": "text", "BOOL": False}.get(spec.dtype, 0)
    return {
        "name": spec.name,
        "datatype": spec.dtype,
        "shape": shape,
        "data": [zero] * element_count(shape),
    }


def _all_of(properties: Json) -> Json:
    """An object in which each of these is always there."""
    return object_of(properties, required=list(properties))


def _list_of(items: Json) -> Json:
    return {"type": "array", "items": items}
