"""URL paths: which route a request takes."""

from __future__ import annotations

from dataclasses import dataclass

from serving.errors import MethodNotAllowed, UnknownModel, UnknownRoute

#: The one version of every model.
VERSION = "1"

_GET_ROUTES = {
    "/": "index",
    "/v2": "server_metadata",
    "/v2/health/live": "live",
    "/v2/health/ready": "ready",
    "/metrics": "metrics",
    "/metrics/processes": "metrics_targets",
    "/openapi.json": "openapi",
    "/-/healthz": "healthz",
    "/-/routes": "serve_routes",
}
#: Where the console's files lie; the page itself is `/`, for browsers.
CONSOLE_PREFIX = "/console/"
#: One process's figures.
PROCESS_PREFIX = "/metrics/processes/"
_POST_ROUTES = {"/v2/repository/index": "repository_index"}
_MODEL_ROUTES = {
    "": ("GET", "model_metadata"),
    "ready": ("GET", "model_ready"),
    "config": ("GET", "model_config"),
    "stats": ("GET", "model_stats"),
    "example": ("GET", "model_example"),
    "precision": ("GET", "model_precision"),
    "infer": ("POST", "infer"),
}
#: What an operator does to a tier: `/v2/models/{m}/tiers/{t}/ACTION`.
TIER_ACTIONS = ("trip", "reset")
#: Answered without a token: probes have none, and the console's files say nothing about this server.
OPEN_ROUTES = frozenset({"live", "ready", "healthz", "console"})


@dataclass(frozen=True, slots=True)
class Route:
    """A route, and the model that its path names."""

    name: str
    model: str = ""
    tier: str = ""
    #: Of the console.
    file: str = ""
    #: Of those whose figures the hub merges.
    process: str = ""


_MODELS_PREFIX = "/v2/models/"


def infer_path(model: str) -> str:
    """Where a model takes inference requests."""
    return f"{_MODELS_PREFIX}{model}/infer"


def find_route(method: str, path: str) -> Route:
    """The route of a request.

    Raises:
        UnknownRoute: no route has this path.
        UnknownModel: the path asks for a version other than 1.
        MethodNotAllowed: the path is a route for another method.
    """
    if len(path) > 1 and path.endswith("/"):
        path = path[:-1]
    name, allowed = _GET_ROUTES.get(path), "GET"
    model = tier = file = process = ""
    if name is None and path.startswith(CONSOLE_PREFIX):
        name, file = "console", path.removeprefix(CONSOLE_PREFIX)
    if name is None and path.startswith(PROCESS_PREFIX):
        name, process = "process_metrics", path.removeprefix(PROCESS_PREFIX)
    if name is None:
        name, allowed = _POST_ROUTES.get(path), "POST"
    if name is None and path.startswith(_MODELS_PREFIX):
        model, allowed, name, tier = _model_route(path.removeprefix(_MODELS_PREFIX))
    if name is None:
        raise UnknownRoute("no such route; /openapi.json lists them")
    if method == "HEAD" and allowed == "GET":
        method = "GET"  # The HTTP server leaves the body out.
    if method != allowed:
        raise MethodNotAllowed(f"this route takes {allowed}", allowed)
    return Route(name, model, tier, file, process)


def _model_route(tail: str) -> tuple[str, str, str | None, str]:
    """`NAME[/versions/V][/ACTION]` or `NAME/tiers/TIER/ACTION` -> model, method, route name, tier."""
    parts = tail.split("/")
    model, rest = parts[0], parts[1:]
    if rest[:1] == ["versions"] and len(rest) > 1:
        if rest[1] != VERSION:
            raise UnknownModel(f"every model has one version, {VERSION}")
        rest = rest[2:]
    if len(rest) == 3 and rest[0] == "tiers" and rest[2] in TIER_ACTIONS:  # noqa: PLR2004
        return model, "POST", f"tier_{rest[2]}", rest[1]
    if len(rest) > 1 or not model:
        return model, "GET", None, ""
    method, name = _MODEL_ROUTES.get(rest[0] if rest else "", ("GET", None))
    return model, method, name, ""
