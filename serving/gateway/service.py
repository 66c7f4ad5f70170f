"""`Service.handle`: one request in, one response out, whatever the request holds.

Every error becomes its status and the one JSON shape here and nowhere else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import orjson

from serving import __version__
from serving.config import ServerConfig
from serving.errors import (
    BadJson,
    BadPrecision,
    DeviceLost,
    InternalError,
    ModelError,
    NotReady,
    RequestError,
    TierLost,
    UnknownModel,
    UnknownRoute,
    quote,
)
from serving.gateway import descriptions
from serving.gateway.auth import Authenticator
from serving.gateway.inference import Inference, RequestContext
from serving.gateway.model import ServedModel
from serving.gateway.routes import OPEN_ROUTES, Route, find_route, infer_path
from serving.observe.console import CONSOLE_FILES, SECURITY_HEADERS
from serving.observe.metrics import NO_TIER, GatewayMetrics
from serving.observe.page import OPENMETRICS_CONTENT_TYPE, PLAIN_CONTENT_TYPE
from serving.observe.request_log import RequestLog, Trace, parse_traceparent
from serving.observe.snapshot import Family
from serving.protocol.http import REQUEST_ID_HEADER, Headers, Request, Response, error_body
from serving.protocol.openapi import openapi_document

logger = logging.getLogger("halftone.gateway")

JSON_HEADER = ("content-type", "application/json")
MAX_REQUEST_ID_LENGTH = 128
#: W3C Trace Context; logged, and returned as it came.
TRACE_HEADER = "traceparent"
#: Code label of requests whose client went away before the answer, as nginx counts them.
CLIENT_GONE = "499"

_T = TypeVar("_T")
CONSOLE_PAGE = "console.html"
_PAST = {"trip": "tripped", "reset": "reset"}

#: Made ids: a random start for each process, then counted.
_ID_PREFIX = os.urandom(4).hex()
_ids = itertools.count(1)


class HubClient(Protocol):
    """What all processes share: the merged metrics, and every tier's state."""

    async def page(self, openmetrics: bool) -> bytes:
        """The rendered page."""

    async def families(self) -> list[Family]:
        """The merged families."""

    async def processes(self) -> list[str]:
        """Live processes with a page of their own."""

    async def process_page(self, process: str, openmetrics: bool) -> bytes | None:
        """One process's page; None where it does not live."""

    async def set_tier(self, model: str, tier: str, action: str, reason: str) -> None:
        """Trip or reset a tier by hand."""


#: Faults of the server or the model. Refusals under load are counted: logged, a client could
#: fill the disk with them.
_LOGGED = (InternalError, ModelError, TierLost, DeviceLost)


class Service:
    """The gateway's logic over its models. All methods run on one event loop."""

    def __init__(
        self,
        server: ServerConfig,
        models: Mapping[str, ServedModel],
        metrics: GatewayMetrics,
        authenticator: Authenticator,
        hub: HubClient,
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._authenticator = authenticator
        self._hub = hub
        self._address = f"{server.host}:{server.port}"
        self._inference = Inference(server, models, metrics)
        self._log = RequestLog()
        self._infer_routes = {("POST", infer_path(name)): Route("infer", name) for name in models}
        self._inflight_requests = 0
        self._draining = False
        self._retiring = False
        self._routes: dict[str, Callable[[Request, Route], Response | Awaitable[Response]]] = {
            "index": lambda *_: _json(descriptions.index(models.values())),
            "console": lambda _, route: _console(route.file),
            "server_metadata": lambda *_: _json(descriptions.server_metadata()),
            "live": lambda *_: _json({"live": True}),
            "ready": lambda request, _: self._ready(models, request.headers),
            "metrics": self._metrics_page,
            "metrics_targets": self._metrics_targets,
            "process_metrics": self._process_metrics,
            "openapi": lambda *_: _json(self._openapi()),
            "healthz": lambda *_: Response(200, [("content-type", "text/plain")], b"success"),
            "serve_routes": lambda *_: _json({"/": "halftone"}),
            "repository_index": lambda *_: _json(descriptions.repository_index(models.values())),
            "model_metadata": self._model_metadata,
            "model_ready": self._model_ready,
            "model_config": self._model_config,
            "model_stats": self._model_stats,
            "model_example": self._model_example,
            "model_precision": self._model_precision,
            "tier_trip": self._set_tier,
            "tier_reset": self._set_tier,
        }

    @property
    def models(self) -> Iterable[ServedModel]:
        """All models."""
        return self._models.values()

    @property
    def inflight_requests(self) -> int:
        """Inference requests that have no response yet."""
        return self._inflight_requests

    @property
    def is_draining(self) -> bool:
        """Whether new inference is refused."""
        return self._draining

    def drain(self) -> None:
        """From now on: not ready, and no new inference. What is in flight is finished."""
        self._draining = True

    def retire(self) -> None:
        """From now on, each response asks its client to connect anew: others have taken over."""
        self._retiring = True

    async def handle(self, request: Request) -> Response:
        """Answer a request. Never raises but when it is cancelled."""
        context = RequestContext(_request_id(request.headers), time.perf_counter())
        context.trace = request.headers.once(_trace)
        try:
            route = self._route_of(request)
            if route.name not in OPEN_ROUTES:
                context.caller = self._authenticator.check(request.headers.get_all("authorization"))
            if route.name == "infer":
                response = await self._infer(request, route.model, context)
                if context.is_sampled:
                    self._log.write(_log_fields(context, response.status), refused=False)
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
        if context.trace is not None:
            response.headers.append((TRACE_HEADER, context.trace.traceparent))
        if self._retiring:
            response.headers.append(("connection", "close"))
        return response

    def _route_of(self, request: Request) -> Route:
        # Almost every request is an inference, and finding that out can be done once.
        known = self._infer_routes.get((request.method, request.path))
        if known is not None:
            return known
        route = find_route(request.method, request.path)
        if route.name == "index" and "text/html" in (request.headers.get("accept") or ""):
            return Route("console", file=CONSOLE_PAGE)
        return route

    def refuse(self, error: RequestError, headers: Headers | None) -> Response:
        """The response to a request that ended before `handle`: its body was too large, say."""
        context = RequestContext(_request_id(headers), time.perf_counter())
        response = self._refusal(error, context)
        response.headers.append((REQUEST_ID_HEADER, context.request_id))
        return response

    def _refusal(self, error: RequestError, context: RequestContext) -> Response:
        tier = context.lane.tier if context.lane else NO_TIER
        if isinstance(error, _LOGGED):
            # repr: a message may quote the model's own words, and those may span lines.
            logger.warning(
                "request %s: %s: %r",
                context.request_id,
                error.code,
                str(error),
                exc_info=error.__cause__,
            )
        elif self._log.wants_refusal(time.perf_counter()):
            self._log.write(_log_fields(context, error.status, error.code), refused=True)
        self._metrics.requests.labels(context.model, tier, str(error.status)).inc()
        self._metrics.rejected.labels(context.model, tier, error.code).inc()
        if context.lane:
            context.lane.metrics.request_duration.observe(time.perf_counter() - context.started_s)
        return Response(error.status, [JSON_HEADER, *error.headers], error_body(error, context.request_id))

    async def _infer(self, request: Request, name: str, context: RequestContext) -> Response:
        model = self._model(name)
        context.model = model.name
        if self._draining:
            raise NotReady("the server is shutting down")
        self._inflight_requests += 1
        context.is_sampled = self._log.wants_answer(context.started_s)
        try:
            return await self._inference.answer(model, request, context)
        finally:
            self._inflight_requests -= 1

    def _model(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            raise UnknownModel(f"no model {quote(name)}; here: {', '.join(self._models)}")
        return model

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
        families = await self._from_hub(self._hub.families())
        return _json(descriptions.triton_statistics(model.name, families))

    def _model_precision(self, _request: Request, route: Route) -> Response:
        return _json(descriptions.measured_precision(self._model(route.model)))

    async def _set_tier(self, request: Request, route: Route) -> Response:
        model = self._model(route.model)
        if model.precision is None:
            raise BadPrecision("this model has no fp32 tier: there is nothing to move traffic to")
        if route.tier not in model.lanes:
            raise UnknownRoute(f"model {model.name} has no such tier; it has {', '.join(model.lanes)}")
        if route.tier == model.precision.reference:
            raise BadPrecision(f"{route.tier} is the reference: nothing is more precise")
        action = route.name.removeprefix("tier_")
        await self._from_hub(self._hub.set_tier(model.name, route.tier, action, _given_reason(request.body)))
        logger.warning("tier %s of %s was %s by hand", route.tier, model.name, _PAST[action])
        return _json({"model": model.name, "tier": route.tier, "action": action})

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
        openmetrics = _wants_openmetrics(request)
        return _page(await self._from_hub(self._hub.page(openmetrics)), openmetrics)

    async def _process_metrics(self, request: Request, route: Route) -> Response:
        openmetrics = _wants_openmetrics(request)
        page = await self._from_hub(self._hub.process_page(route.process, openmetrics))
        if page is None:
            raise UnknownRoute("no such process lives; /metrics/processes lists them")
        return _page(page, openmetrics)

    async def _metrics_targets(self, request: Request, _route: Route) -> Response:
        address = request.headers.get("host") or self._address
        return _json(descriptions.metrics_targets(address, await self._from_hub(self._hub.processes())))

    def _openapi(self) -> dict[str, Any]:
        signatures = {name: model.signature for name, model in self._models.items()}
        tiers = {tier for model in self._models.values() for tier in model.lanes}
        return openapi_document(signatures, __version__, tiers)


def _wants_openmetrics(request: Request) -> bool:
    return "application/openmetrics-text" in (request.headers.get("accept") or "")


def _page(page: bytes, openmetrics: bool) -> Response:
    content_type = OPENMETRICS_CONTENT_TYPE if openmetrics else PLAIN_CONTENT_TYPE
    return Response(200, [("content-type", content_type)], page)


def _log_fields(context: RequestContext, status: int, code: str | None = None) -> dict[str, object]:
    """What a request's line says."""
    return {
        "request_id": context.request_id,
        "caller": context.caller,
        "model": context.model,
        "tier": context.lane.tier if context.lane else NO_TIER,
        "reason": context.reason or None,
        "status": status,
        "code": code,
        "duration_ms": round((time.perf_counter() - context.started_s) * 1000, 3),
        "trace_id": context.trace.trace_id if context.trace else None,
    }


def _given_reason(body: bytes) -> str:
    """Why an operator does it: the body's `reason`, escaped and short, for logs and other operators."""
    if not body:
        return "by hand"
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise BadJson('the body is JSON, as in {"reason": "new weights"}, or empty') from None
    reason = document.get("reason") if isinstance(document, dict) else None
    if not isinstance(reason, str):
        raise BadJson("the body is an object with a text `reason`, or empty")
    return f"by hand: {quote(reason, 200)}"


def _json(document: object) -> Response:
    return Response(200, [JSON_HEADER], orjson.dumps(document))


def _console(name: str) -> Response:
    file = CONSOLE_FILES.get(name)
    if file is None:
        raise UnknownRoute("no such route; /openapi.json lists them")
    return Response(200, [("content-type", file.content_type), *SECURITY_HEADERS], file.body)


def _internal(error: Exception) -> InternalError:
    internal = InternalError("the server failed; its log has the details under this id")
    internal.__cause__ = error
    return internal


def _request_id(headers: Headers | None) -> str:
    """The client's request id where it is printable ASCII and short; a new one otherwise."""
    given = headers.once(_given_request_id) if headers is not None else None
    return given or f"{_ID_PREFIX}{next(_ids) & 0xFFFFFFFF:08x}"


def _given_request_id(headers: Headers) -> str | None:
    given = headers.get(REQUEST_ID_HEADER)
    if given and len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return None


def _trace(headers: Headers) -> Trace | None:
    return parse_traceparent(headers.get(TRACE_HEADER))
