"""The OpenAPI 3.1 description of the HTTP interface, made from the models' signatures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from serving import errors
from serving.errors import RequestError
from serving.tensors import DTYPES, FREE, Signature, TensorSpec

_Json = dict[str, Any]

_PRECISION_FORMS = (
    "A tier by name (`fp32`), a sensitivity class (`critical`), or a tolerance (`rel_l2<=1e-3`). "
    "The request is answered by that precision or a higher one, or refused; a class that the operator "
    "lets degrade under load says `degraded` in the reply."
)
_REPLY_HEADERS: Mapping[str, str] = {
    "X-Request-Id": "The request's id: the client's own, or a new one.",
    "X-Precision-Tier": "The tier that answered.",
    "X-Precision-Effective": "The arithmetic that a probe measured on that tier.",
    "X-Precision-Reason": "Why: `tier`, `class=…`, `tolerance`, `default`, `budget`, `degraded`, "
    "`escalated=…`.",
    "X-Precision-Measured": "With a tolerance: what the tier is known to keep within, by how many rows.",
    "X-Precision-Escalated-Rows": "Rows that were run again at the reference because they overflowed.",
    "X-Precision-Divergence": "With `X-Precision-Verify`: distance to the reference for this request.",
    "X-Precision-Verdict": "With `X-Precision-Verify`: `pass`, `warn` or `fail`.",
}
_INFER_ERRORS: tuple[type[RequestError], ...] = (
    errors.BadJson,
    errors.TooDeep,
    errors.NonfiniteInput,
    errors.BadType,
    errors.BadShape,
    errors.BadTensor,
    errors.BadPrecision,
    errors.BadHeader,
    errors.BodyTimeout,
    errors.PrecisionUnavailable,
    errors.TooLarge,
    errors.UnsupportedMedia,
    errors.NonfiniteOutput,
    errors.Quarantined,
    errors.ModelError,
    errors.Overloaded,
    errors.TooManyConnections,
    errors.NotReady,
    errors.DeviceOutOfMemory,
    errors.DeviceLost,
    errors.TierLost,
    errors.Deadline,
)
#: What any route may answer.
_COMMON_ERRORS: tuple[type[RequestError], ...] = (
    errors.Unauthorized,
    errors.MethodNotAllowed,
    errors.InternalError,
)


def openapi_document(models: Mapping[str, Signature], version: str) -> dict[str, Any]:
    """Describe every route.

    Args:
        models: The served models' signatures, by name.
        version: Halftone's own version.

    Returns:
        An OpenAPI 3.1 document, ready to be written as JSON.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Halftone",
            "version": version,
            "summary": "PyTorch models served at several precisions over the Open Inference Protocol v2.",
        },
        "security": [{}, {"bearer": []}],
        "paths": {**_server_paths(), **_model_paths(sorted(models))},
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "headers": {name: _reply_header(text) for name, text in _REPLY_HEADERS.items()},
            "schemas": {**_protocol_schemas(), **_model_schemas(models)},
        },
    }


def _server_paths() -> _Json:
    return {
        "/v2": {"get": _operation("serverMetadata", "The server's name, version and extensions.", _object())},
        "/v2/health/live": {"get": _operation("live", "Whether the process runs.", _object())},
        "/v2/health/ready": {
            "get": _operation("ready", "Whether every tier is ready.", _object(), failures=[errors.NotReady])
        },
        "/v2/repository/index": {
            "post": _operation(
                "repositoryIndex", "The models and their states.", {"type": "array", "items": _object()}
            )
        },
        "/metrics": {
            "get": _operation(
                "metrics",
                "Prometheus metrics of all processes.",
                {"type": "string"},
                media="text/plain",
                failures=[errors.NotReady],
            )
        },
        "/metrics/processes": {
            "get": _operation(
                "metricsTargets",
                "Every process, for Prometheus' HTTP service discovery.",
                {"type": "array", "items": _object()},
                failures=[errors.NotReady],
            )
        },
        "/metrics/processes/{process}": {
            "parameters": [{"name": "process", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": _operation(
                "processMetrics",
                "Prometheus metrics of one process.",
                {"type": "string"},
                media="text/plain",
                failures=[errors.UnknownRoute, errors.NotReady],
            ),
        },
        "/openapi.json": {"get": _operation("openapi", "This document.", _object())},
    }


def _model_paths(names: list[str]) -> _Json:
    # A parameter's `enum` must not be empty.
    schema: _Json = {"type": "string", **({"enum": names} if names else {})}
    model = {"name": "model", "in": "path", "required": True, "schema": schema}
    missing: list[type[RequestError]] = [errors.UnknownModel]
    reads = {
        "": ("modelMetadata", "The model's signature, tiers and attested precision.", missing),
        "/ready": ("modelReady", "Whether the model is ready.", [*missing, errors.NotReady]),
        "/config": ("modelConfig", "The model's configuration, as Triton's clients expect it.", missing),
        "/stats": ("modelStatistics", "Counts and durations, as Triton's clients expect them.", missing),
        "/example": ("modelExample", "A body to post to `/infer`.", [*missing, errors.NotReady]),
        "/precision": ("modelPrecision", "Each tier's measured divergence, its state and why.", missing),
    }
    schemas = {"/example": _reference("InferRequest"), "/precision": _precision_schema()}
    paths: _Json = {
        f"/v2/models/{{model}}{suffix}": {
            "parameters": [model],
            "get": _operation(name, text, schemas.get(suffix, _object()), failures=failures),
        }
        for suffix, (name, text, failures) in reads.items()
    }
    paths |= _tier_paths(model)
    paths["/v2/models/{model}/infer"] = {"parameters": [model], "post": _infer_operation()}
    return paths


def _tier_paths(model: _Json) -> _Json:
    """What an operator does to a tier."""
    tier = {"name": "tier", "in": "path", "required": True, "schema": {"type": "string"}}
    body = {
        "required": False,
        "content": {
            "application/json": {"schema": _object({"reason": {"type": "string"}}, required=["reason"])}
        },
    }
    failures = [
        errors.BadJson,
        errors.BadPrecision,
        errors.UnknownRoute,
        errors.UnknownModel,
        errors.NotReady,
    ]
    summaries = {
        "trip": "Take a tier out of service until it is reset: its traffic goes to a more precise one.",
        "reset": "Let a tier serve again; what was measured of it is forgotten.",
    }
    done = _object({name: {"type": "string"} for name in ("model", "tier", "action")})
    return {
        f"/v2/models/{{model}}/tiers/{{tier}}/{action}": {
            "parameters": [model, tier],
            "post": {**_operation(f"{action}Tier", summary, done, failures=failures), "requestBody": body},
        }
        for action, summary in summaries.items()
    }


def _precision_schema() -> _Json:
    """What `GET /v2/models/{m}/precision` answers."""
    figure = {"type": ["number", "null"], "description": "null where it is not known, or infinite."}
    figures = _object(additionalProperties=figure)
    tier = _object(
        {
            "state": {"enum": ["serving", "tripped", "probing"]},
            "reason": {"type": "string"},
            "by_hand": {"type": "boolean"},
            "samples": {"type": "integer", "minimum": 0},
            "budget_ratio": figure,
            "quantiles": figures,
            "bounds": figures,
        },
        required=["state", "reason"],
    )
    budget = {name: {"type": "number"} for name in ("limit", "quantile", "window", "min_samples")}
    return _object(
        {
            "model": {"type": "string"},
            "reference": {"type": ["string", "null"]},
            "sample": {"type": "number"},
            "budget": _object({"metric": {"type": "string"}, **budget}),
            "floor": figures,
            "tiers": _object(additionalProperties=tier),
        },
        required=["model", "reference", "budget", "floor", "tiers"],
    )


def _infer_operation() -> _Json:
    operation = _operation(
        "infer",
        "Run the model.",
        _reference("InferResponse"),
        failures=[errors.UnknownModel, *_INFER_ERRORS],
    )
    operation["parameters"] = [
        _request_header("X-Precision", _PRECISION_FORMS, {"type": "string"}),
        _request_header(
            "X-Precision-Verify",
            "Run the reference too and report the distance of this very request.",
            {"type": "boolean"},
        ),
        _request_header(
            "X-Request-Timeout-Seconds", "When to give up.", {"type": "number", "exclusiveMinimum": 0}
        ),
        _request_header("X-Request-Id", "Echoed in the reply.", {"type": "string", "maxLength": 128}),
        _request_header(
            "Inference-Header-Content-Length",
            "Where the JSON of a binary body ends, in bytes.",
            {"type": "integer", "minimum": 0},
        ),
        _request_header(
            "Content-Encoding", "How the body is compressed.", {"enum": ["identity", "gzip", "deflate"]}
        ),
    ]
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": _reference("InferRequest")}, **_binary_content()},
    }
    success = operation["responses"]["200"]
    success["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in _REPLY_HEADERS}
    success["content"].update(_binary_content())
    return operation


def _binary_content() -> _Json:
    return {
        "application/octet-stream": {
            "schema": {"description": "JSON, then raw little-endian tensors (binary tensor data extension)."}
        }
    }


def _operation(
    name: str,
    summary: str,
    schema: _Json,
    *,
    media: str = "application/json",
    failures: Iterable[type[RequestError]] = (),
) -> _Json:
    success = {
        "description": "Success.",
        "headers": {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}},
        "content": {media: {"schema": schema}},
    }
    responses = {"200": success, **_error_responses([*failures, *_COMMON_ERRORS])}
    return {"operationId": name, "summary": summary, "responses": responses}


def _error_responses(failures: Iterable[type[RequestError]]) -> _Json:
    """One response for each status, naming the codes that share it."""
    codes: dict[int, list[str]] = {}
    for failure in failures:
        codes.setdefault(failure.status, []).append(failure.code)
    return {str(status): _error_response(status, slugs) for status, slugs in sorted(codes.items())}


def _error_response(status: int, codes: list[str]) -> _Json:
    headers: _Json = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    if status == errors.Overloaded.status:
        seconds = {"type": "integer", "minimum": 0}
        headers["Retry-After"] = {"description": "Seconds to wait before trying again.", "schema": seconds}
    return {
        "description": f"Code {', '.join(f'`{code}`' for code in codes)}.",
        "headers": headers,
        "content": {"application/json": {"schema": _reference("Error")}},
    }


def _protocol_schemas() -> _Json:
    scalar = {"type": ["string", "number", "boolean", "null"]}
    parameters = _object(additionalProperties=scalar)
    tensor = {
        "name": {"type": "string"},
        "datatype": {"enum": list(DTYPES)},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        "parameters": parameters,
        "data": {"type": "array", "description": "Row-major, flat or nested; absent where sent in binary."},
    }
    output = _object({"name": {"type": "string"}, "parameters": parameters}, required=["name"])
    head: _Json = {"id": {"type": "string", "maxLength": 128}, "parameters": parameters}
    tensors = {"type": "array", "items": _reference("Tensor")}
    named = {"model_name": {"type": "string"}, "model_version": {"type": "string"}}
    slug = {"type": "string", "description": "What went wrong, for programs."}
    return {
        "Error": _object(
            {"error": {"type": "string"}, "code": slug, "id": {"type": "string"}},
            required=["error", "code", "id"],
        ),
        "Tensor": _object(tensor, required=["name", "datatype", "shape"]),
        "InferRequest": _object(
            {**head, "inputs": tensors, "outputs": {"type": "array", "items": output}}, required=["inputs"]
        ),
        "InferResponse": _object(
            {**named, **head, "outputs": tensors}, required=["model_name", "model_version", "outputs"]
        ),
    }


def _model_schemas(models: Mapping[str, Signature]) -> _Json:
    """Each model's inputs and outputs, for readers and for generated clients."""
    return {
        f"model.{name}": _object(
            {
                "inputs": {"type": "array", "prefixItems": [_tensor_schema(s) for s in signature.inputs]},
                "outputs": {"type": "array", "prefixItems": [_tensor_schema(s) for s in signature.outputs]},
            }
        )
        for name, signature in sorted(models.items())
    }


def _tensor_schema(spec: TensorSpec) -> _Json:
    sizes: list[_Json] = [
        {"type": "integer", "minimum": 1} if n == FREE else {"const": n} for n in spec.shape
    ]
    shape: _Json = {"type": "array", "prefixItems": sizes, "minItems": len(sizes), "maxItems": len(sizes)}
    return _object({"name": {"const": spec.name}, "datatype": {"const": spec.dtype}, "shape": shape})


def _object(properties: _Json | None = None, **keywords: Any) -> _Json:
    return {"type": "object", **({"properties": properties} if properties else {}), **keywords}


def _reference(name: str) -> _Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _request_header(name: str, description: str, schema: _Json) -> _Json:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _reply_header(description: str) -> _Json:
    return {"description": description, "schema": {"type": "string"}}
