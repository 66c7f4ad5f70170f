"""Paths and methods."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import MethodNotAllowed, UnknownModel, UnknownRoute
from serving.gateway.routes import OPEN_ROUTES, Route, find_route

ROUTES = [
    ("GET", "/", "index", ""),
    ("GET", "/v2", "server_metadata", ""),
    ("GET", "/v2/health/live", "live", ""),
    ("GET", "/v2/health/ready", "ready", ""),
    ("GET", "/metrics", "metrics", ""),
    ("GET", "/metrics/processes", "metrics_targets", ""),
    ("GET", "/openapi.json", "openapi", ""),
    ("GET", "/-/healthz", "healthz", ""),
    ("GET", "/-/routes", "serve_routes", ""),
    ("POST", "/v2/repository/index", "repository_index", ""),
    ("GET", "/v2/models/m", "model_metadata", "m"),
    ("GET", "/v2/models/m/ready", "model_ready", "m"),
    ("GET", "/v2/models/m/config", "model_config", "m"),
    ("GET", "/v2/models/m/stats", "model_stats", "m"),
    ("GET", "/v2/models/m/example", "model_example", "m"),
    ("POST", "/v2/models/m/infer", "infer", "m"),
    ("GET", "/v2/models/m/versions/1", "model_metadata", "m"),
    ("POST", "/v2/models/m/versions/1/infer", "infer", "m"),
    ("GET", "/v2/models/versions/versions/1/ready", "model_ready", "versions"),
]


@pytest.mark.parametrize(("method", "path", "name", "model"), ROUTES)
def test_a_route_is_found(method: str, path: str, name: str, model: str) -> None:
    """Also with a slash at its end."""
    assert find_route(method, path) == Route(name, model)
    assert find_route(method, path if path == "/" else path + "/") == Route(name, model)


@pytest.mark.parametrize(("method", "path", "name", "model"), ROUTES)
@pytest.mark.parametrize("other", ["GET", "POST", "PUT", "DELETE", "get", ""])
def test_another_method_is_told_which_is_allowed(
    method: str, path: str, name: str, model: str, other: str
) -> None:
    """405 with Allow."""
    if other == method:
        return
    with pytest.raises(MethodNotAllowed) as caught:
        find_route(other, path)
    assert caught.value.headers == (("allow", method),)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "///",
        "/v1",
        "/v2/models",
        "/v2/models/",
        "/v2/models//infer",
        "/v2/models/m/train",
        "/v2/models/m/infer/now",
        "/v2/models/m/versions",
        "/v2/models/m/versions/1/infer/x",
        "/v2/models/../../etc/passwd",
        "/V2",
        "/v2/health",
        "/metrics/x",
        "metrics",
    ],
)
def test_no_other_path_is_a_route(path: str) -> None:
    """404, whatever the method."""
    for method in ("GET", "POST"):
        with pytest.raises(UnknownRoute):
            find_route(method, path)


@pytest.mark.parametrize("version", ["0", "2", "01", "latest", ""])
def test_a_model_has_one_version(version: str) -> None:
    """Asking for another is asking for another model."""
    with pytest.raises(UnknownModel):
        find_route("GET", f"/v2/models/m/versions/{version}/ready")


PARTS = st.sampled_from(
    ["", "/", "v2", "models", "m", "..", "versions", "1", "infer", "ready", "health", "é"]
)


@given(st.sampled_from(["GET", "POST", "PUT"]), st.one_of(st.text(), st.lists(PARTS).map("/".join)))
def test_any_path_is_a_route_or_refused(method: str, path: str) -> None:
    """404 or 405; a model's name never holds a slash."""
    with contextlib.suppress(UnknownRoute, UnknownModel, MethodNotAllowed):
        assert "/" not in find_route(method, path).model


def test_only_probes_go_without_a_token() -> None:
    """Nothing that tells of models or traffic."""
    assert {"live", "ready", "healthz", "console"} == OPEN_ROUTES


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/metrics", "/v2/models/m"])
def test_head_is_a_get_without_a_body(path: str) -> None:
    """Load balancers ask so; what is posted to has no head."""
    assert find_route("HEAD", path) == find_route("GET", path)
    with pytest.raises(MethodNotAllowed):
        find_route("HEAD", "/v2/models/m/infer")


def test_what_lies_behind_the_consoles_prefix_is_a_name() -> None:
    """The service knows a few; no other one is a file."""
    assert find_route("GET", "/console/console.js") == Route("console", file="console.js")
    assert find_route("GET", "/console/../serving/cli.py") == Route("console", file="../serving/cli.py")
