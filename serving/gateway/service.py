"""`Service.handle`: one request in, one response out, whatever the request holds.

Every error becomes its status and the one JSON shape here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import orjson

from serving import __version__
from serving.config import ServerConfig
from serving.errors import (
    BadHeader,
    BadPrecision,
    Deadline,
    DeviceLost,
    InternalError,
    ModelError,
    NonfiniteOutput,
    NotReady,
    RequestError,
    TierLost,
    UnknownModel,
    UnsupportedMedia,
    quote,
)
from serving.gateway import descriptions
from serving.gateway.auth import Authenticator
from serving.gateway.model import Lane, ServedModel
from serving.gateway.routes import OPEN_ROUTES, VERSION, Route, find_route
from serving.models.source import ModelSource
from serving.observe.hub import OPENMETRICS_CONTENT_TYPE, PLAIN_CONTENT_TYPE, Family
from serving.observe.metrics import NO_TIER, OTHER, GatewayMetrics
from serving.protocol.compression import decompress
from serving.protocol.http import Headers, Request, Response, error_body
from serving.protocol.oip import InferRequest, decode_infer, encode_infer
from serving.protocol.openapi import openapi_document
from serving.routing.declaration import declared_precision
from serving.routing.policy import Decision
from serving.tensors import Tensors

logger = logging.getLogger("halftone.gateway")

JSON_HEADER = ("content-type", "application/json")
REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_LENGTH = 128
#: Code label of requests whose client went away before the answer, as nginx counts them.
CLIENT_GONE = "499"
#: Threads for a model's own preprocessing. It holds the GIL or computes; more would not help.
PREPROCESSING_THREADS = 2
_INFER_CONTENT_TYPES = frozenset({"", "application/json", "application/octet-stream"})
_US_PER_S = 1_000_000
_MAX_TIMEOUT_US = 2**63


_T = TypeVar("_T")


class MetricsSource(Protocol):
    """The merged metrics of all processes."""

    async def page(self, openmetrics: bool) -> bytes:
        """The rendered page."""

    async def families(self) -> list[Family]:
        """The merged families."""


#: Faults of the server or the model. Refusals under load are counted: logged, a client could
#: fill the disk with them.
_LOGGED = (InternalError, ModelError, TierLost, DeviceLost)


@dataclass(slots=True)
class _Context:
    """What is known about a request so far: for its metrics, its log lines and its error."""

    request_id: str
    started_s: float
    model: str = OTHER
    lane: Lane | None = None
    is_infer: bool = False


class Service:
    """The gateway's logic over its models. All methods run on one event loop."""

    def __init__(
        self,
        server: ServerConfig,
        models: Mapping[str, ServedModel],
        metrics: GatewayMetrics,
        authenticator: Authenticator,
        metrics_source: MetricsSource,
    ) -> None:
        self._server = server
        self._models = models
        self._metrics = metrics
        self._authenticator = authenticator
        self._metrics_source = metrics_source
        # Threads of its own for each model: one that is slow delays no other.
        self._preprocessing = {
            name: ThreadPoolExecutor(PREPROCESSING_THREADS, f"preprocess-{name}") for name in models
        }
        self._inflight_requests = 0
        self._draining = False
        self._routes: dict[str, Callable[[Request, Route], Response | Awaitable[Response]]] = {
            "index": lambda *_: _json(descriptions.index(models.values())),
            "server_metadata": lambda *_: _json(descriptions.server_metadata()),
            "live": lambda *_: _json({"live": True}),
            "ready": lambda request, _: self._ready(models, request.headers),
            "metrics": self._metrics_page,
            "openapi": lambda *_: _json(self._openapi()),
            "healthz": lambda *_: Response(200, [("content-type", "text/plain")], b"success"),
            "serve_routes": lambda *_: _json({"/": "halftone"}),
            "repository_index": lambda *_: _json(descriptions.repository_index(models.values())),
            "model_metadata": self._model_metadata,
            "model_ready": self._model_ready,
            "model_config": self._model_config,
            "model_stats": self._model_stats,
            "model_example": self._model_example,
        }

    @property
    def inflight_requests(self) -> int:
        """Inference requests that have no response yet."""
        return self._inflight_requests

    def drain(self) -> None:
        """From now on: not ready, and no new inference. What is in flight is finished."""
        self._draining = True

    async def handle(self, request: Request) -> Response:
        """Answer a request. Never raises but when it is cancelled."""
        context = _Context(_request_id(request.headers), time.perf_counter())
        try:
            route = find_route(request.method, request.path)
            if route.name not in OPEN_ROUTES:
                self._authenticator.check(request.headers.get_all("authorization"))
            if route.name == "infer":
                response = await self._infer(request, route.model, context)
            else:
                answer = self._routes[route.name](request, route)
                response = answer if isinstance(answer, Response) else await answer
        except RequestError as error:
            response = self._refusal(error, context)
        except asyncio.CancelledError:
            tier = context.lane.tier if context.lane else NO_TIER
            self._metrics.requests.labels(context.model, tier, CLIENT_GONE).inc()
            raise
        except Exception as error:
            response = self._refusal(_internal(error), context)
        response.headers.append((REQUEST_ID_HEADER, context.request_id))
        return response

    def refuse(self, error: RequestError, headers: Headers | None) -> Response:
        """The response to a request that ended before `handle`: its body was too large, say."""
        context = _Context(_request_id(headers), time.perf_counter())
        response = self._refusal(error, context)
        response.headers.append((REQUEST_ID_HEADER, context.request_id))
        return response

    def _refusal(self, error: RequestError, context: _Context) -> Response:
        tier = context.lane.tier if context.lane else NO_TIER
        if isinstance(error, _LOGGED):
            # repr: a message may quote the model's own words, and those may span lines.
            logger.warning(
                "request %s: %s: %r", context.request_id, error.code, str(error), exc_info=error.__cause__
            )
        self._metrics.requests.labels(context.model, tier, str(error.status)).inc()
        self._metrics.rejected.labels(context.model, tier, error.code).inc()
        if context.lane:
            context.lane.metrics.request_duration.observe(time.perf_counter() - context.started_s)
        return Response(error.status, [JSON_HEADER, *error.headers], error_body(error, context.request_id))

    async def _infer(self, request: Request, name: str, context: _Context) -> Response:
        self._inflight_requests += 1
        try:
            return await self._answer(request, name, context)
        finally:
            self._inflight_requests -= 1

    async def _answer(self, request: Request, name: str, context: _Context) -> Response:
        started_s = asyncio.get_running_loop().time()
        model = self._model(name)
        context.model = model.name
        if self._draining:
            raise NotReady("the server is shutting down")
        infer = decode_infer(
            self._plain_body(request),
            _json_length(request.headers),
            model.ready_signature(),
            max_rows=model.max_rows,
        )
        if infer.id and request.headers.get(REQUEST_ID_HEADER) is None:
            context.request_id = infer.id
        decision = self._decide(model, request.headers, infer)
        lane = context.lane = model.lanes[decision.tier]
        timeout_s = self._timeout_s(request.headers, infer.parameters)
        outputs = await self._compute(model, lane, infer, started_s + timeout_s)
        response = _infer_response(model, lane, decision, infer, outputs)
        lane.metrics.answered.inc()
        lane.metrics.request_duration.observe(time.perf_counter() - context.started_s)
        return response

    def _model(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"no model {quote(name)}; here: {', '.join(self._models)}")
        return model

    def _plain_body(self, request: Request) -> bytes:
        content_type = (request.headers.get("content-type") or "").partition(";")[0].strip().lower()
        if content_type not in _INFER_CONTENT_TYPES:
            raise UnsupportedMedia(
                f"content type {quote(content_type)}; send application/json, or application/octet-stream "
                "with Inference-Header-Content-Length"
            )
        encoding = request.headers.get("content-encoding")
        if encoding is None:
            return request.body
        return decompress(request.body, encoding, self._server.max_body_bytes)

    def _decide(self, model: ServedModel, headers: Headers, infer: InferRequest) -> Decision:
        verify = headers.get("x-precision-verify")
        if verify is not None and verify.strip().lower() != "false":
            raise BadPrecision("X-Precision-Verify is not served yet")
        declared = declared_precision(headers.get_all("x-precision"), infer.parameters.get("precision"))
        decision = model.table.decide(declared)
        self._metrics.routed.labels(model.name, decision.declared, decision.tier, decision.reason).inc()
        return decision

    def _timeout_s(self, headers: Headers, parameters: Mapping[str, object]) -> float:
        """The shortest of the server's limit, the header's seconds and OIP's microseconds."""
        timeouts_s = [self._server.request_timeout_s]
        header = headers.get("x-request-timeout-seconds")
        if header is not None:
            timeouts_s.append(_positive_number(header, "X-Request-Timeout-Seconds"))
        timeout_us = parameters.get("timeout")
        if timeout_us is not None:
            if not isinstance(timeout_us, int) or isinstance(timeout_us, bool) or timeout_us < 0:
                raise BadHeader("the parameter timeout is a whole number of microseconds")
            if timeout_us > 0:  # Triton's clients send 0 for none.
                # JSON's integers have no bound, a float's range has.
                timeouts_s.append(min(timeout_us, _MAX_TIMEOUT_US) / _US_PER_S)
        return min(timeouts_s)

    async def _compute(
        self, model: ServedModel, lane: Lane, infer: InferRequest, deadline_s: float
    ) -> Tensors:
        coalescer, _ = lane.ready_coalescer()
        coalescer.admit(infer.rows)
        try:
            tensors = await self._preprocess(model, infer.inputs, deadline_s)
        except BaseException:
            coalescer.release(infer.rows)
            raise
        outputs = await coalescer.submit(tensors, infer.rows, deadline_s)
        for array in outputs.values():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise NonfiniteOutput("the model's answer holds NaN or infinity for this input")
        return outputs

    async def _preprocess(self, model: ServedModel, inputs: Tensors, deadline_s: float) -> Tensors:
        if not model.preprocesses or model.source is None:
            return inputs
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(deadline_s):
                outcome = await loop.run_in_executor(
                    self._preprocessing[model.name], _preprocessed, model.source, inputs
                )
        except TimeoutError:
            raise Deadline("the request's time ran out while it was preprocessed") from None
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def _ready(self, models: Mapping[str, ServedModel], headers: Headers) -> Response:
        told = self._authenticator.accepts(headers.get_all("authorization"))
        problems = {
            f"{name}/{tier}": problem if told else "not ready"
            for name, model in models.items()
            for tier, problem in model.problems.items()
        }
        if self._draining:
            raise NotReady("the server is shutting down")
        if problems:
            raise NotReady("; ".join(f"{where}: {problem}" for where, problem in problems.items()))
        return _json({"ready": True})

    def _model_ready(self, request: Request, route: Route) -> Response:
        model = self._model(route.model)
        return self._ready({model.name: model}, request.headers)

    def _model_metadata(self, _request: Request, route: Route) -> Response:
        model = self._model(route.model)
        return _json(descriptions.model_metadata(model, model.ready_signature()))

    def _model_config(self, _request: Request, route: Route) -> Response:
        model = self._model(route.model)
        return _json(descriptions.triton_config(model, model.ready_signature()))

    def _model_example(self, _request: Request, route: Route) -> Response:
        model = self._model(route.model)
        signature = model.ready_signature()
        if not model.example:
            raise NotReady(f"model {model.name} has no example: it failed to load")
        return _json(descriptions.example_request(signature, model.example))

    async def _model_stats(self, _request: Request, route: Route) -> Response:
        model = self._model(route.model)
        families = await self._from_hub(self._metrics_source.families())
        return _json(descriptions.triton_statistics(model.name, families))

    async def _from_hub(self, answer: Awaitable[_T]) -> _T:
        """What the hub answers.

        Raises:
            NotReady: it does not. Serve replaces it within seconds.
        """
        try:
            return await answer
        except Exception as error:
            raise NotReady("the process that merges the metrics does not answer") from error

    async def _metrics_page(self, request: Request, _route: Route) -> Response:
        openmetrics = "application/openmetrics-text" in (request.headers.get("accept") or "")
        page = await self._from_hub(self._metrics_source.page(openmetrics))
        content_type = OPENMETRICS_CONTENT_TYPE if openmetrics else PLAIN_CONTENT_TYPE
        return Response(200, [("content-type", content_type)], page)

    def _openapi(self) -> dict[str, Any]:
        signatures = {
            name: model.signature for name, model in self._models.items() if model.signature is not None
        }
        return openapi_document(signatures, __version__)


def _preprocessed(source: ModelSource, inputs: Tensors) -> Tensors | RequestError:
    """The source's `preprocess`, or what to tell the client. Runs on a worker thread.

    It is foreign code: SystemExit and StopIteration, raised through a future, would end the
    gateway or never arrive.
    """
    try:
        return source.preprocess(inputs)
    except RequestError as error:
        return error
    except BaseException as error:
        failed = ModelError("the model's preprocessing failed")
        failed.__cause__ = error
        return failed


def _infer_response(
    model: ServedModel, lane: Lane, decision: Decision, infer: InferRequest, outputs: Tensors
) -> Response:
    effective = lane.description.effective if lane.description else ""
    facts = {
        "precision_tier": decision.tier,
        "precision_effective": effective,
        "precision_reason": decision.reason,
    }
    headers, body = encode_infer(model.name, VERSION, infer, outputs, facts)
    headers += [
        ("x-precision-tier", decision.tier),
        ("x-precision-effective", effective),
        ("x-precision-reason", decision.reason),
    ]
    return Response(200, headers, body)


def _json(document: object) -> Response:
    return Response(200, [JSON_HEADER], orjson.dumps(document))


def _internal(error: Exception) -> InternalError:
    internal = InternalError("the server failed; its log has the details under this id")
    internal.__cause__ = error
    return internal


def _request_id(headers: Headers | None) -> str:
    """The client's request id where it is printable ASCII and short; a new one otherwise."""
    given = headers.get(REQUEST_ID_HEADER) if headers is not None else None
    if given and len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return os.urandom(8).hex()


def _json_length(headers: Headers) -> int | None:
    value = headers.get("inference-header-content-length")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 19):  # noqa: PLR2004  Below 2^63.
        raise BadHeader("Inference-Header-Content-Length is a whole number of bytes")
    return int(value)


def _positive_number(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise BadHeader(f"{name} is a number above zero")
    return number
