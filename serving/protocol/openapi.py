"""The OpenAPI 3.1 description of the HTTP interface, made from the models' signatures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from serving import errors
from serving.errors import RequestError
from serving.protocol import openapi_schemas as schemas
from serving.protocol.openapi_schemas import Json, object_of, reference_to
from serving.tensors import Signature

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
#: What any route may answer: every request may have a body, and a body that never ends.
_COMMON_ERRORS: tuple[type[RequestError], ...] = (
    errors.BadJson,
    errors.BadHeader,
    errors.BadRequest,
    errors.UrlTooLong,
    errors.HeadTooLarge,
    errors.BodyTimeout,
    errors.TooLarge,
    errors.Unauthorized,
    errors.MethodNotAllowed,
    errors.InternalError,
)


def openapi_document(
    models: Mapping[str, Signature | None], version: str, tiers: Collection[str] = ()
) -> dict[str, Any]:
    """Describe every route.

    Args:
        models: The served models' signatures, by name; None while a model is loading.
        version: Halftone's own version.
        tiers: Names of the models' tiers; none: any name.

    Returns:
        An OpenAPI 3.1 document, ready to be written as JSON.
    """
    loaded = {name: signature for name, signature in models.items() if signature is not None}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Halftone",
            "version": version,
            "summary": "PyTorch models served at several precisions over the Open Inference Protocol v2.",
        },
        "security": [{}, {"bearer": []}],
        "paths": {**_server_paths(), **_model_paths(sorted(models), sorted(tiers), loaded)},
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "headers": {name: _reply_header(text) for name, text in _REPLY_HEADERS.items()},
            "schemas": {**schemas.protocol_schemas(), **schemas.model_schemas(loaded)},
        },
    }


def _server_paths() -> Json:
    live, ready = schemas.ready_schema("live"), schemas.ready_schema("ready")
    no_hub: list[type[RequestError]] = [errors.NotReady]
    metrics = _operation(
        "metrics", "Prometheus metrics of all processes.", schemas.TEXT, media="text/plain", failures=no_hub
    )
    metadata = schemas.server_metadata_schema()
    repository = schemas.repository_schema()
    return {
        "/v2": {"get": _operation("serverMetadata", "The server's name, version and extensions.", metadata)},
        "/v2/health/live": {"get": _operation("live", "Whether the process runs.", live)},
        "/v2/health/ready": {
            "get": _operation("ready", "Whether every tier is ready.", ready, failures=[errors.NotReady])
        },
        "/v2/repository/index": {
            "post": _operation("repositoryIndex", "The models and their states.", repository)
        },
        "/metrics": {"get": metrics},
        "/metrics/processes": {
            "get": _operation(
                "metricsTargets",
                "Every process, for Prometheus' HTTP service discovery.",
                schemas.targets_schema(),
                failures=no_hub,
            )
        },
        "/metrics/processes/{process}": {
            "parameters": [_path_parameter("process", [])],
            "get": _operation(
                "processMetrics",
                "Prometheus metrics of one process.",
                schemas.TEXT,
                media="text/plain",
                failures=[errors.UnknownRoute, *no_hub],
            ),
        },
        "/openapi.json": {"get": _operation("openapi", "This document.", object_of())},
    }


def _model_paths(models: list[str], tiers: list[str], loaded: Mapping[str, Signature]) -> Json:
    model = _path_parameter("model", models)
    missing: list[type[RequestError]] = [errors.UnknownModel]
    unready: list[type[RequestError]] = [*missing, errors.NotReady]
    reads: dict[str, tuple[str, str, Json, list[type[RequestError]]]] = {
        "": (
            "modelMetadata",
            "The model's signature, tiers and attested precision.",
            schemas.metadata_schema(),
            unready,
        ),
        "/ready": ("modelReady", "Whether the model is ready.", schemas.ready_schema("ready"), unready),
        "/config": (
            "modelConfig",
            "The model's configuration, as Triton's clients expect it.",
            schemas.configuration_schema(),
            unready,
        ),
        "/stats": (
            "modelStatistics",
            "Counts and durations, as Triton's clients expect them.",
            schemas.statistics_schema(),
            unready,
        ),
        "/example": ("modelExample", "A body to post to `/infer`.", reference_to("InferRequest"), unready),
        "/precision": (
            "modelPrecision",
            "Each tier's measured divergence, its state and why.",
            schemas.precision_schema(),
            missing,
        ),
    }
    paths: Json = {
        f"/v2/models/{{model}}{suffix}": {
            "parameters": [model],
            "get": _operation(name, text, schema, failures=failures),
        }
        for suffix, (name, text, schema, failures) in reads.items()
    }
    paths |= _tier_paths(model, _path_parameter("tier", tiers))
    paths["/v2/models/{model}/infer"] = {"parameters": [model], "post": _infer_operation(loaded)}
    return paths


def _path_parameter(name: str, values: list[str]) -> Json:
    # An `enum` must not be empty; without one, the name is at least not.
    known: Json = {"enum": values} if values else {"minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": {**schemas.TEXT, **known}}


def _tier_paths(model: Json, tier: Json) -> Json:
    """What an operator does to a tier."""
    body = {
        "required": False,
        "content": {
            "application/json": {"schema": object_of({"reason": {"type": "string"}}, required=["reason"])}
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
    done = object_of({name: {"type": "string"} for name in ("model", "tier", "action")})
    return {
        f"/v2/models/{{model}}/tiers/{{tier}}/{action}": {
            "parameters": [model, tier],
            "post": {**_operation(f"{action}Tier", summary, done, failures=failures), "requestBody": body},
        }
        for action, summary in summaries.items()
    }


def _infer_operation(loaded: Mapping[str, Signature]) -> Json:
    operation = _operation(
        "infer",
        "Run the model.",
        reference_to("InferResponse"),
        failures=[errors.UnknownModel, *_INFER_ERRORS],
    )
    operation["parameters"] = [
        _request_header("X-Precision", _PRECISION_FORMS, {"type": "string", "pattern": r"\S"}),
        _request_header(
            "X-Precision-Verify",
            "Run the reference too and report the distance of this very request.",
            {"type": "boolean"},
        ),
        _request_header(
            "X-Request-Timeout-Seconds", "When to give up.", {"type": "number", "exclusiveMinimum": 0}
        ),
        _request_header(
            "X-Request-Id",
            "Echoed in the reply if it is at most 128 printable ASCII characters; else a new one is made.",
            schemas.TEXT,
        ),
        _request_header(
            "Inference-Header-Content-Length",
            "Where the JSON of a binary body ends, in bytes.",
            {"type": "integer", "minimum": 0},
        ),
        _request_header(
            "Content-Encoding", "How the body is compressed.", {"enum": ["identity", "gzip", "deflate"]}
        ),
    ]
    request: Json = {"schema": reference_to("InferRequest")}
    if examples := schemas.request_examples(loaded):
        request["examples"] = examples
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": request, **_binary_content()},
    }
    success = operation["responses"]["200"]
    success["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in _REPLY_HEADERS}
    success["content"].update(_binary_content())
    return operation


def _binary_content() -> Json:
    return {
        "application/octet-stream": {
            "schema": {"description": "JSON, then raw little-endian tensors (binary tensor data extension)."}
        }
    }


def _operation(
    name: str,
    summary: str,
    schema: Json,
    *,
    media: str = "application/json",
    failures: Iterable[type[RequestError]] = (),
) -> Json:
    success = {
        "description": "Success.",
        "headers": {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}},
        "content": {media: {"schema": schema}},
    }
    responses = {"200": success, **_error_responses([*failures, *_COMMON_ERRORS])}
    return {"operationId": name, "summary": summary, "responses": responses}


def _error_responses(failures: Iterable[type[RequestError]]) -> Json:
    """One response for each status, naming the codes that share it."""
    codes: dict[int, list[str]] = {}
    for failure in failures:
        codes.setdefault(failure.status, []).append(failure.code)
    return {str(status): _error_response(status, slugs) for status, slugs in sorted(codes.items())}


def _error_response(status: int, codes: list[str]) -> Json:
    headers: Json = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}
    if status == errors.Overloaded.status:
        seconds = {"type": "integer", "minimum": 0}
        headers["Retry-After"] = {"description": "Seconds to wait before trying again.", "schema": seconds}
    return {
        "description": f"Code {', '.join(f'`{code}`' for code in codes)}.",
        "headers": headers,
        "content": {"application/json": {"schema": reference_to("Error")}},
    }


def _request_header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _reply_header(description: str) -> Json:
    return {"description": description, "schema": {"type": "string"}}
