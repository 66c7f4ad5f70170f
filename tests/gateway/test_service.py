"""`Service.handle` from request to response: tiers in memory, no socket."""

import asyncio
import gzip
import json
import logging
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from serving.errors import BadShape, BodyTimeout, ModelError
from serving.protocol.http import Headers, Request

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]
INFER = "/v2/models/m/infer"
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


def body(**fields: Any) -> bytes:
    """A JSON request of one row."""
    return json.dumps({"inputs": [TENSOR], **fields}).encode()


def refused(response: Any, status: int, code: str) -> dict[str, Any]:
    """Check an error in the one form that all errors have; its document."""
    document: dict[str, Any] = json.loads(response.body)
    headers = dict(response.headers)
    assert (response.status, document["code"]) == (status, code), document
    assert set(document) == {"error", "code", "id"}
    assert document["id"] == headers["x-request-id"]
    assert headers["content-type"] == "application/json"
    return document


# --- answers ----------------------------------------------------------------------------------


def test_an_unavailable_precision_is_refused_with_its_reason(gateway: Any, run: Run) -> None:
    """409 for the tier and for classes bound to it, while the server is ready and others answer."""

    async def scenario() -> None:
        lane = gateway.model.lanes["fp32"]
        lane.description = replace(lane.description, unavailable="its products take FP16 operands")
        for declared in ("fp32", "critical"):
            response = await gateway.infer(("x-precision", declared))
            document = json.loads(response.body)
            assert (response.status, document["code"]) == (409, "precision_unavailable")
            assert document["error"] == "its products take FP16 operands"
        assert (await gateway.infer(("x-precision", "fp16"))).status == 200
        assert (await gateway.get("/v2/health/ready"))[0] == 200
        tiers = (await gateway.get("/v2/models/m"))[1]["tiers"]
        assert tiers["fp32"]["unavailable"] == "its products take FP16 operands"
        assert not tiers["fp32"]["ready"]

    run(scenario)


def test_a_json_request_is_answered(gateway: Any, run_virtually: Run) -> None:
    """Outputs, and the precision that made them, in headers and body alike."""

    async def scenario() -> None:
        response = await gateway.infer(rows=2)
        document = json.loads(response.body)
        headers = dict(response.headers)
        assert response.status == 200
        (output,) = document["outputs"]
        assert (output["name"], output["datatype"], output["shape"]) == ("y", "FP32", [2, 2])
        assert output["data"] == [3.0, -4.0, 3.0, -4.0]
        assert document["parameters"] == {
            "precision_tier": "fp16",
            "precision_effective": "fp16-measured",
            "precision_reason": "default",
        }
        assert headers["x-precision-tier"] == "fp16"
        assert headers["x-precision-effective"] == "fp16-measured"
        assert headers["x-precision-reason"] == "default"
        gateway.assert_idle()

    run_virtually(scenario)


def test_a_binary_request_is_answered_in_binary(gateway: Any, run_virtually: Run) -> None:
    """Raw numbers behind the JSON, both ways."""

    async def scenario() -> None:
        numbers = np.array([[1.5, -2.0]], "<f4")
        tensor = {
            "name": "x",
            "datatype": "FP32",
            "shape": [1, 2],
            "parameters": {"binary_data_size": numbers.nbytes},
        }
        text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        length = ("Inference-Header-Content-Length", str(len(text)))
        response = await gateway.call("POST", INFER, text + numbers.tobytes(), [length])
        assert response.status == 200
        headers = dict(response.headers)
        assert headers["content-type"] == "application/octet-stream"
        tail = response.body[int(headers["inference-header-content-length"]) :]
        np.testing.assert_array_equal(np.frombuffer(tail, "<f4"), [3, -4])

    run_virtually(scenario)


def test_a_compressed_request_is_answered(gateway: Any, run_virtually: Run) -> None:
    """gzip, within the limit once inflated."""

    async def scenario() -> None:
        packed = gzip.compress(body())
        assert (await gateway.call("POST", INFER, packed, [("content-encoding", "gzip")])).status == 200

    run_virtually(scenario)


@pytest.mark.parametrize(
    ("declared", "tier", "reason"),
    [
        ("fp32", "fp32", "tier"),
        ("fp16", "fp16", "tier"),
        ("critical", "fp32", "class=critical"),
        ("standard", "fp16", "class=standard"),
    ],
)
def test_the_declared_precision_answers(
    declared: str, tier: str, reason: str, gateway: Any, run_virtually: Run
) -> None:
    """Declared in the header, in the body, or in both; no other tier sees the rows."""

    async def scenario() -> None:
        header, parameter = ("X-Precision", declared), {"precision": declared}
        for response in (
            await gateway.infer(header),
            await gateway.infer(parameters=parameter),
            await gateway.infer(header, parameters=parameter),
        ):
            headers = dict(response.headers)
            assert (headers["x-precision-tier"], headers["x-precision-reason"]) == (tier, reason)
        assert {name: memory.rows for name, memory in gateway.tiers.items() if memory.rows} == {
            tier: [1, 1, 1]
        }

    run_virtually(scenario)


def test_requests_share_batches_and_get_their_own_rows(make_gateway: Any, run_virtually: Run) -> None:
    """What the coalescer is for."""

    async def scenario() -> None:
        gateway = make_gateway()

        async def slow(batch: Any) -> Any:
            await asyncio.sleep(0.1)
            return {"y": batch["x"] * 2}

        gateway.tiers["fp16"].answer = slow
        responses = await asyncio.gather(*(gateway.infer(rows=rows) for rows in range(1, 8)))
        shapes = [json.loads(response.body)["outputs"][0]["shape"] for response in responses]
        assert shapes == [[rows, 2] for rows in range(1, 8)]
        assert len(gateway.tiers["fp16"].rows) < 7
        gateway.assert_idle()

    run_virtually(scenario)


# --- request ids ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "in_body", "expected"),
    [
        ("r-7", None, "r-7"),
        ("r-7", "b-9", "r-7"),
        (None, "b-9", "b-9"),
        ("x" * 128, None, "x" * 128),
        (None, None, "[0-9a-f]{16}"),
        (None, "", "[0-9a-f]{16}"),
        ("", None, "[0-9a-f]{16}"),
        ("x" * 129, None, "[0-9a-f]{16}"),
        ("tab\tbed", None, "[0-9a-f]{16}"),
        ("é", None, "[0-9a-f]{16}"),
    ],
)
def test_every_response_has_a_request_id(
    header: str | None, in_body: str | None, expected: str, gateway: Any, run_virtually: Run
) -> None:
    """The caller's where it is printable and short, else a new one. Exactly one."""

    async def scenario() -> None:
        headers = [] if header is None else [("X-Request-Id", header)]
        fields = {} if in_body is None else {"id": in_body}
        response = await gateway.infer(*headers, **fields)
        ids = [value for name, value in response.headers if name == "x-request-id"]
        assert len(ids) == 1
        assert re.fullmatch(expected, ids[0])

    run_virtually(scenario)


def test_made_request_ids_differ(gateway: Any, run_virtually: Run) -> None:
    """Two requests can be told apart in a log."""

    async def scenario() -> None:
        responses = [await gateway.infer() for _ in range(20)]
        assert len({dict(response.headers)["x-request-id"] for response in responses}) == 20

    run_virtually(scenario)


# --- refusals ---------------------------------------------------------------------------------

Pairs = list[tuple[str, str]]
REFUSALS: list[tuple[str, str, bytes, Pairs, int, str]] = [
    ("POST", INFER, b"", [], 400, "bad_json"),
    ("POST", INFER, b"{", [], 400, "bad_json"),
    ("POST", INFER, b"\xff", [], 400, "bad_json"),
    ("POST", INFER, b"[" * 200, [], 400, "too_deep"),
    ("POST", INFER, b'{"inputs":[]}', [], 400, "bad_tensor"),
    ("POST", INFER, body().replace(b"[1, 2]}", b"[1, 1e999]}"), [], 400, "nonfinite_input"),
    ("POST", INFER, body().replace(b"[1, 2]}", b"[1, NaN]}"), [], 400, "nonfinite_input"),
    ("POST", INFER, body().replace(b"[1, 2]}", b'[1, "2"]}'), [], 400, "bad_type"),
    ("POST", INFER, body().replace(b"FP32", b"FP16"), [], 400, "bad_type"),
    ("POST", INFER, body().replace(b'"shape": [1, 2]', b'"shape": [1, 3]'), [], 400, "bad_shape"),
    ("POST", INFER, body().replace(b'"shape": [1, 2]', b'"shape": [2, 2]'), [], 400, "bad_shape"),
    ("POST", INFER, body().replace(b'"x"', b'"z"'), [], 400, "bad_tensor"),
    ("POST", INFER, body(outputs=[{"name": "z"}]), [], 400, "bad_tensor"),
    ("POST", INFER, body(parameters={"timeout": -1}), [], 400, "bad_header"),
    ("POST", INFER, body(parameters={"timeout": 1.5}), [], 400, "bad_header"),
    ("POST", INFER, body(parameters={"timeout": True}), [], 400, "bad_header"),
    ("POST", INFER, body(parameters={"precision": "fp8"}), [], 400, "bad_precision"),
    ("POST", INFER, body(parameters={"precision": 16}), [], 400, "bad_precision"),
    ("POST", INFER, body(), [("X-Precision", "fp8")], 400, "bad_precision"),
    ("POST", INFER, body(), [("X-Precision", "")], 400, "bad_precision"),
    ("POST", INFER, body(), [("X-Precision", "fp16"), ("X-Precision", "fp16")], 400, "bad_precision"),
    ("POST", INFER, body(), [("X-Precision", "rel_l2<=0")], 400, "bad_precision"),
    ("POST", INFER, body(), [("X-Precision-Verify", "yes")], 400, "bad_precision"),
    ("POST", INFER, body(), [("X-Request-Timeout-Seconds", "soon")], 400, "bad_header"),
    ("POST", INFER, body(), [("X-Request-Timeout-Seconds", "1_0")], 400, "bad_header"),
    ("POST", INFER, body(), [("X-Request-Timeout-Seconds", "0")], 400, "bad_header"),
    ("POST", INFER, body(), [("X-Request-Timeout-Seconds", "nan")], 400, "bad_header"),
    ("POST", INFER, body(), [("X-Request-Timeout-Seconds", "inf")], 400, "bad_header"),
    ("POST", INFER, body(), [("X-Request-Timeout-Seconds", "9")] * 2, 400, "bad_header"),
    ("POST", INFER, body(), [("X-Precision-Verify", "true")] * 2, 400, "bad_header"),
    ("POST", INFER, body(), [("Content-Type", "application/json")] * 2, 400, "bad_header"),
    ("POST", INFER, body(), [("Content-Encoding", "gzip")] * 2, 400, "bad_header"),
    ("POST", INFER, body(), [("Inference-Header-Content-Length", "5")] * 2, 400, "bad_header"),
    ("POST", INFER, body(), [("Inference-Header-Content-Length", "-1")], 400, "bad_header"),
    ("POST", INFER, body(), [("Inference-Header-Content-Length", "9" * 30)], 400, "bad_header"),
    ("POST", INFER, body(), [("Inference-Header-Content-Length", "9" * 9)], 400, "bad_header"),
    ("POST", INFER, body(), [("Inference-Header-Content-Length", "²")], 400, "bad_header"),
    ("POST", INFER, body(), [("Content-Type", "text/html")], 415, "unsupported_media_type"),
    ("POST", INFER, body(), [("Content-Encoding", "br")], 415, "unsupported_media_type"),
    ("POST", INFER, b"x", [("Content-Encoding", "gzip")], 400, "bad_json"),
    ("POST", INFER, gzip.compress(b"0" * 5000), [("Content-Encoding", "gzip")], 413, "too_large"),
    ("POST", "/v2/models/n/infer", body(), [], 404, "unknown_model"),
    ("POST", "/v2/models/../infer", body(), [], 404, "unknown_model"),
    ("POST", "/v2/models/m/versions/2/infer", body(), [], 404, "unknown_model"),
    ("GET", "/v2/models/n", b"", [], 404, "unknown_model"),
    ("GET", "/etc/passwd", b"", [], 404, "unknown_route"),
    ("GET", INFER, b"", [], 405, "method_not_allowed"),
    ("DELETE", "/", b"", [], 405, "method_not_allowed"),
]


@pytest.mark.parametrize(("method", "path", "payload", "headers", "status", "code"), REFUSALS)
def test_a_bad_request_is_refused_and_the_next_good_one_answered(
    *,
    method: str,
    path: str,
    payload: bytes,
    headers: Pairs,
    status: int,
    code: str,
    make_gateway: Any,
    run_virtually: Run,
) -> None:
    """One form for every error; no row reaches a tier; the metrics page still parses."""

    async def scenario() -> None:
        gateway = make_gateway(max_body_bytes=4096)
        refused(await gateway.call(method, path, payload, headers), status, code)
        assert all(tier.rows == [] for tier in gateway.tiers.values())
        assert (await gateway.infer()).status == 200
        list(parse_plain((await gateway.page(False)).decode()))
        gateway.assert_idle()

    run_virtually(scenario)


def test_a_refused_method_names_the_allowed_one(gateway: Any, run_virtually: Run) -> None:
    """In Allow."""

    async def scenario() -> None:
        response = await gateway.call("PUT", INFER)
        assert dict(response.headers)["allow"] == "POST"

    run_virtually(scenario)


def test_a_refusal_before_the_body_has_the_same_form(gateway: Any) -> None:
    """What the HTTP server itself refuses goes through here too."""
    response = gateway.service.refuse(BodyTimeout("too slow"), Headers([("X-Request-Id", "r")]))
    assert refused(response, 408, "body_timeout")["id"] == "r"
    refused(gateway.service.refuse(BodyTimeout("too slow"), None), 408, "body_timeout")


# --- overload, deadlines, callers that leave --------------------------------------------------


def hold(gateway: Any, tier: str = "fp16") -> asyncio.Event:
    """Have a tier wait with every batch until the event is set."""
    release = asyncio.Event()

    async def answer(batch: Any) -> Any:
        await release.wait()
        return {"y": batch["x"] * 2}

    gateway.tiers[tier].answer = answer
    return release


async def settle() -> None:
    """Let everything happen that needs no time."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_full_queue_is_503_with_retry_after(make_gateway: Any, run_virtually: Run) -> None:
    """The queued ones are answered; the other tier is not concerned."""

    async def scenario() -> None:
        gateway = make_gateway(tier={"max_queue_rows": 4, "batching": {"max_rows": 4}})
        release = hold(gateway)
        tasks = []
        for _ in range(3):
            tasks.append(asyncio.create_task(gateway.infer(rows=4)))
            await settle()
        response = await gateway.infer()
        refused(response, 503, "overloaded")
        assert int(dict(response.headers)["retry-after"]) >= 1
        assert (await gateway.infer(("X-Precision", "fp32"))).status == 200
        release.set()
        assert [response.status for response in await asyncio.gather(*tasks)] == [200] * 3
        gateway.assert_idle()

    run_virtually(scenario)


def test_more_rows_than_the_queue_holds_are_413(make_gateway: Any, run_virtually: Run) -> None:
    """Coming back later would not help."""

    async def scenario() -> None:
        gateway = make_gateway(tier={"max_queue_rows": 4})
        refused(await gateway.infer(rows=5), 413, "too_large")
        gateway.assert_idle()

    run_virtually(scenario)


@pytest.mark.parametrize(
    ("headers", "parameters", "expected_s"),
    [
        ([], {}, 3.0),
        ([("X-Request-Timeout-Seconds", "0.25")], {}, 0.25),
        ([], {"timeout": 500_000}, 0.5),
        ([("X-Request-Timeout-Seconds", "2")], {"timeout": 500_000}, 0.5),
        ([("X-Request-Timeout-Seconds", "900")], {"timeout": 0}, 3.0),
        ([], {"timeout": 2**63}, 3.0),
    ],
)
def test_the_shortest_deadline_counts(
    headers: Pairs, parameters: dict[str, Any], expected_s: float, make_gateway: Any, run_virtually: Run
) -> None:
    """The server's, the header's, the protocol's: 504 when the first is over."""

    async def scenario() -> None:
        gateway = make_gateway(request_timeout_s=3.0)
        release = hold(gateway)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        refused(await gateway.infer(*headers, parameters=parameters), 504, "deadline")
        assert loop.time() - started_s == pytest.approx(expected_s)
        release.set()
        await settle()
        gateway.assert_idle()

    run_virtually(scenario)


@pytest.mark.parametrize("digits", [20, 400])
def test_an_absurd_timeout_is_no_fault_of_the_servers(digits: int, gateway: Any, run_virtually: Run) -> None:
    """A number beyond every machine type."""

    async def scenario() -> None:
        text = body(parameters={"timeout": 0}).replace(b'"timeout": 0', b'"timeout": ' + b"9" * digits)
        assert (await gateway.call("POST", INFER, text)).status in {200, 400}

    run_virtually(scenario)


def test_a_caller_that_leaves_takes_its_rows_along(gateway: Any, run_virtually: Run) -> None:
    """The cancelled request is the one case in which `handle` does not return."""

    async def scenario() -> None:
        release = hold(gateway)
        tasks = [asyncio.create_task(gateway.infer(rows=40)) for _ in range(3)]
        await settle()
        assert gateway.service.inflight_requests == 3
        for task in tasks:
            task.cancel()
        await settle()
        assert all(task.cancelled() for task in tasks)
        sent = sum(gateway.tiers["fp16"].rows)
        release.set()
        await settle()
        assert sum(gateway.tiers["fp16"].rows) == sent < 120
        gateway.assert_idle()

    run_virtually(scenario)


# --- models that misbehave --------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_answer_that_is_not_finite_is_422_for_its_request_only(
    value: float, gateway: Any, run_virtually: Run
) -> None:
    """A mate of the same batch gets its rows."""

    async def scenario() -> None:
        async def answer(batch: Any) -> Any:
            await asyncio.sleep(0.01)
            outputs = batch["x"] * 2
            outputs[0, 1] = value
            return {"y": outputs}

        gateway.tiers["fp16"].answer = answer
        bad, *mates = await asyncio.gather(*(gateway.infer() for _ in range(3)))
        assert gateway.tiers["fp16"].rows == [3]
        refused(bad, 422, "nonfinite_output")
        assert [mate.status for mate in mates] == [200, 200]
        gateway.assert_idle()

    run_virtually(scenario)


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [(ModelError("the model raised"), 500, "model_error"), (OSError("/secret/path"), 500, "internal")],
)
def test_a_tier_that_raises_is_500_without_internals(
    *,
    raised: Exception,
    status: int,
    code: str,
    gateway: Any,
    run_virtually: Run,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are in the log, under the request's id."""

    async def scenario() -> None:
        async def answer(_: Any) -> Any:
            raise raised

        gateway.tiers["fp16"].answer = answer
        document = refused(await gateway.infer(("X-Request-Id", "r-7")), status, code)
        assert "secret" not in document["error"]
        assert "request r-7: " in caplog.text
        gateway.assert_idle()

    with caplog.at_level(logging.WARNING):
        run_virtually(scenario)


def test_an_output_that_is_missing_is_500(gateway: Any, run_virtually: Run) -> None:
    """Not a hang, not a half answer."""

    async def scenario() -> None:
        gateway.tiers["fp16"].answer = lambda batch: {"z": batch["x"]}
        refused(await gateway.infer(), 500, "internal")

    run_virtually(scenario)


def preprocessing(gateway_type: Any, preprocess: Callable[[Any], Any], **options: Any) -> Any:
    """A gateway whose model preprocesses like this."""
    base = type(gateway_type().source)

    class Preprocessing(base):  # type: ignore[misc,valid-type]
        def preprocess(self, inputs: Any) -> Any:
            return preprocess(inputs)

    return gateway_type(source=Preprocessing(), **options)


def test_preprocessing_runs_before_the_tier(make_gateway: Any, run: Run) -> None:
    """On a thread of the gateway."""

    async def scenario() -> None:
        gateway = preprocessing(make_gateway, lambda inputs: {"x": inputs["x"] + 1})
        response = await gateway.infer()
        assert json.loads(response.body)["outputs"][0]["data"] == [5.0, -2.0]

    run(scenario)


def raising(error: Exception) -> Callable[[Any], Any]:
    """Preprocessing that fails."""

    def preprocess(_: Any) -> Any:
        raise error

    return preprocess


@pytest.mark.parametrize(
    ("preprocess", "status", "code"),
    [
        (raising(ValueError("secret")), 500, "model_error"),
        (raising(TimeoutError("secret")), 500, "model_error"),
        (raising(BadShape("too many words")), 400, "bad_shape"),
        (lambda inputs: {"x": inputs["x"][:0]}, 500, "model_error"),
        (lambda inputs: {"x": np.concatenate([inputs["x"]] * 2)}, 500, "model_error"),
        (lambda _: {}, 500, "model_error"),
        (lambda _: None, 500, "model_error"),
    ],
    ids=["raises", "raises-timeout", "refuses", "fewer-rows", "more-rows", "nothing", "none"],
)
def test_preprocessing_that_fails_is_an_error_of_its_request(
    preprocess: Callable[[Any], Any], status: int, code: str, make_gateway: Any, run: Run
) -> None:
    """A source may refuse the request itself; whatever else happens is the model's fault."""

    async def scenario() -> None:
        gateway = preprocessing(make_gateway, preprocess)
        assert "secret" not in refused(await gateway.infer(), status, code)["error"]
        gateway.assert_idle()

    run(scenario)


def test_slow_preprocessing_ends_with_the_deadline(make_gateway: Any, run: Run) -> None:
    """The caller is answered in time, and no row is sent afterwards."""

    async def scenario() -> None:
        def preprocess(inputs: Any) -> Any:
            time.sleep(0.3)
            return inputs

        gateway = preprocessing(make_gateway, preprocess)
        started_s = time.monotonic()
        refused(await gateway.infer(("X-Request-Timeout-Seconds", "0.05")), 504, "deadline")
        assert time.monotonic() - started_s < 0.25
        gateway.assert_idle()
        assert gateway.tiers["fp16"].rows == []

    run(scenario)


# --- readiness, draining, tokens --------------------------------------------------------------


def test_until_a_tier_has_loaded_the_server_lives_and_is_not_ready(
    make_gateway: Any, run_virtually: Run
) -> None:
    """Live 200, ready 503, infer 503."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False)
        assert await gateway.get("/v2/health/live") == (200, {"live": True})
        for path in ("/v2/health/ready", "/v2/models/m/ready"):
            document = refused(await gateway.call("GET", path), 503, "not_ready")
            assert document["error"] == "m/fp32: loading; m/fp16: loading"
        for path in ("/v2/models/m", "/v2/models/m/config", "/v2/models/m/example"):
            refused(await gateway.call("GET", path), 503, "not_ready")
        response = await gateway.infer()
        refused(response, 503, "not_ready")
        assert dict(response.headers)["retry-after"] == "1"
        assert (await gateway.get("/openapi.json"))[0] == 200
        gateway.open()
        assert await gateway.get("/v2/health/ready") == (200, {"ready": True})
        assert await gateway.get("/v2/models/m/ready") == (200, {"ready": True})
        assert (await gateway.infer()).status == 200

    run_virtually(scenario)


def test_a_failed_tier_is_named_with_its_reason(gateway: Any, run_virtually: Run) -> None:
    """Its requests are refused, those of the others answered, and never the other way about."""

    async def scenario() -> None:
        lane = gateway.model.lanes["fp32"]
        lane.description = replace(lane.description, failure="weights of another hash")
        document = refused(await gateway.call("GET", "/v2/health/ready"), 503, "not_ready")
        assert document["error"] == "m/fp32: weights of another hash"
        refused(await gateway.infer(("X-Precision", "critical")), 503, "not_ready")
        assert (await gateway.infer(("X-Precision", "standard"))).status == 200
        assert gateway.tiers["fp32"].rows == []

    run_virtually(scenario)


def test_a_model_that_failed_before_it_had_an_example_has_none(gateway: Any, run_virtually: Run) -> None:
    """503, not a fault."""

    async def scenario() -> None:
        gateway.model.example = {}
        refused(await gateway.call("GET", "/v2/models/m/example"), 503, "not_ready")

    run_virtually(scenario)


def test_a_retiring_gateway_answers_and_asks_to_connect_anew(gateway: Any, run_virtually: Run) -> None:
    """Others have taken over: refusals say so too, and nothing is refused for it."""

    async def scenario() -> None:
        assert "connection" not in dict((await gateway.infer()).headers)
        gateway.service.retire()
        answered, refused = await gateway.infer(), await gateway.infer(("x-precision", "nothing"))
        assert (answered.status, refused.status) == (200, 400)
        assert all(dict(reply.headers)["connection"] == "close" for reply in (answered, refused))
        assert (await gateway.get("/v2/health/ready"))[0] == 200

    run_virtually(scenario)


def test_draining_finishes_what_is_in_flight_and_takes_no_more(gateway: Any, run_virtually: Run) -> None:
    """Ready says no first; live stays."""

    async def scenario() -> None:
        release = hold(gateway)
        task = asyncio.create_task(gateway.infer())
        await settle()
        gateway.service.drain()
        assert gateway.service.inflight_requests == 1
        refused(await gateway.call("GET", "/v2/health/ready"), 503, "not_ready")
        refused(await gateway.infer(("X-Precision", "fp32")), 503, "not_ready")
        assert (await gateway.get("/v2/health/live"))[0] == 200
        release.set()
        assert (await task).status == 200
        assert gateway.service.inflight_requests == 0

    run_virtually(scenario)


def test_with_tokens_only_probes_go_without_one(make_gateway: Any, run_virtually: Run) -> None:
    """Everything else is 401, before it is looked at."""

    async def scenario() -> None:
        token = "0123456789abcdef"  # noqa: S105  A test's.
        gateway = make_gateway(tokens={"alice": token})
        bearer = ("Authorization", f"Bearer {token}")
        for path in ("/v2/health/live", "/v2/health/ready", "/-/healthz"):
            assert (await gateway.call("GET", path)).status == 200
        for path in ("/", "/v2", "/metrics", "/v2/models/m", "/v2/models/n", "/-/routes", "/openapi.json"):
            response = await gateway.call("GET", path)
            refused(response, 401, "unauthorized")
            assert dict(response.headers)["www-authenticate"] == "Bearer"
        refused(await gateway.infer(), 401, "unauthorized")
        assert (await gateway.infer(bearer)).status == 200
        assert (await gateway.get("/v2/models/m", bearer))[0] == 200

    run_virtually(scenario)


def test_a_browser_gets_the_console_and_others_the_index(make_gateway: Any, run_virtually: Run) -> None:
    """The page needs no token: it says nothing, and asks with the one it is given."""

    async def scenario() -> None:
        gateway = make_gateway(tokens={"alice": "0123456789abcdef"})
        page = await gateway.call("GET", "/", headers=[("Accept", "text/html,*/*;q=0.8")])
        assert (page.status, page.body[:15]) == (200, b"<!doctype html>")
        assert dict(page.headers)["content-security-policy"].startswith("default-src 'none'")
        assert (await gateway.call("GET", "/console/charts.js")).status == 200
        for path in ("/console/", "/console/../cli.py", "/console/charts.js/x", "/console/%2e%2e/cli.py"):
            refused(await gateway.call("GET", path), 404, "unknown_route")
        refused(await gateway.call("GET", "/"), 401, "unauthorized")

    run_virtually(scenario)


# --- the other routes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v2"),
        ("GET", "/v2/models/m"),
        ("GET", "/v2/models/m/versions/1"),
        ("GET", "/v2/models/m/config"),
        ("GET", "/v2/models/m/stats"),
        ("GET", "/v2/models/m/example"),
        ("POST", "/v2/repository/index"),
        ("GET", "/openapi.json"),
        ("GET", "/-/routes"),
    ],
)
def test_documents_are_json(method: str, path: str, gateway: Any, run_virtually: Run) -> None:
    """With the content type that says so."""

    async def scenario() -> None:
        response = await gateway.call(method, path)
        assert response.status == 200
        assert ("content-type", "application/json") in response.headers
        json.loads(response.body)

    run_virtually(scenario)


def test_the_example_can_be_posted(gateway: Any, run_virtually: Run) -> None:
    """As it came."""

    async def scenario() -> None:
        example = await gateway.call("GET", "/v2/models/m/example")
        assert (await gateway.call("POST", INFER, example.body)).status == 200

    run_virtually(scenario)


def test_the_metrics_page_comes_in_two_formats(gateway: Any, run_virtually: Run) -> None:
    """OpenMetrics for who accepts it."""

    async def scenario() -> None:
        await gateway.infer()
        plain = await gateway.call("GET", "/metrics")
        accept = ("Accept", "application/openmetrics-text; version=1.0.0")
        openmetrics = await gateway.call("GET", "/metrics", headers=[accept])
        assert dict(plain.headers)["content-type"].startswith("text/plain; version=0.0.4")
        assert dict(openmetrics.headers)["content-type"].startswith("application/openmetrics-text")
        list(parse_plain(plain.body.decode()))
        list(parse_openmetrics(openmetrics.body.decode()))

    run_virtually(scenario)


def test_every_process_has_a_page_of_its_own(gateway: Any, run_virtually: Run) -> None:
    """Prometheus finds them in a list, and asks where it was told of it."""

    async def scenario() -> None:
        await gateway.infer()
        where = ("Host", "halftone.example:8000")
        listed = await gateway.call("GET", "/metrics/processes", headers=[where])
        assert dict(listed.headers)["content-type"] == "application/json"
        targets = json.loads(listed.body)
        assert [target["labels"]["instance"] for target in targets] == ["test", "hub"]
        assert {target for each in targets for target in each["targets"]} == {"halftone.example:8000"}
        path = targets[0]["labels"]["__metrics_path__"]
        page = (await gateway.call("GET", path)).body
        together = (await gateway.call("GET", "/metrics")).body
        assert sorted(page.splitlines()) == sorted(together.splitlines())
        accept = ("Accept", "application/openmetrics-text; version=1.0.0")
        assert (await gateway.call("GET", path, headers=[accept])).body.endswith(b"# EOF\n")
        assert json.loads((await gateway.call("GET", "/metrics/processes")).body)[0]["targets"] == [
            "127.0.0.1:8000"
        ]
        refused(await gateway.call("GET", "/metrics/processes/gone"), 404, "unknown_route")

    run_virtually(scenario)


def test_metrics_that_cannot_be_had_are_503(gateway: Any, run_virtually: Run) -> None:
    """The hub is another process, and comes back."""

    async def scenario() -> None:
        async def page(_: bool) -> bytes:
            raise ConnectionError("gone")

        gateway.page = page
        refused(await gateway.call("GET", "/metrics"), 503, "not_ready")

    run_virtually(scenario)


# --- counting ---------------------------------------------------------------------------------


def test_answers_are_counted_by_model_and_tier(gateway: Any, run_virtually: Run) -> None:
    """Requests, rows, batches, durations, and what was declared."""

    async def scenario() -> None:
        await gateway.infer(rows=3)
        await gateway.infer(("X-Precision", "standard"), rows=2)
        await gateway.infer(("X-Precision", "fp32"))
        count, fp16 = gateway.counted, {"model": "m", "tier": "fp16"}
        assert count("halftone_requests_total", **fp16, code="200") == 2
        assert count("halftone_requests_total", model="m", tier="fp32", code="200") == 1
        assert count("halftone_rows_total", **fp16) == 5
        assert count("halftone_batch_rows_count", **fp16) == 2
        assert count("halftone_request_duration_seconds_count", **fp16) == 2
        assert count("halftone_queue_duration_seconds_count", **fp16) == 2
        assert count("halftone_compute_duration_seconds_sum", **fp16) == pytest.approx(0.002)
        assert count("halftone_routed_total", **fp16, declared="default", reason="default") == 1
        assert count("halftone_routed_total", **fp16, declared="standard", reason="class=standard") == 1
        assert count("halftone_queue_rows", **fp16) == count("halftone_inflight_rows", **fp16) == 0

    run_virtually(scenario)


def test_refusals_are_counted_by_what_is_known_of_the_request(make_gateway: Any, run_virtually: Run) -> None:
    """The tier once it is decided, the model once it is found, else `none` and `other`."""

    async def scenario() -> None:
        gateway = make_gateway(model={"tiers": {"fp32": {}, "fp16": {"max_queue_rows": 4}}})
        await gateway.infer(rows=5)
        await gateway.infer(("X-Precision", "fp8"))
        await gateway.call("POST", "/v2/models/n/infer", body())
        count = gateway.counted
        assert count("halftone_rejected_total", model="m", tier="fp16", reason="too_large") == 1
        assert count("halftone_rejected_total", model="m", tier="none", reason="bad_precision") == 1
        assert count("halftone_rejected_total", model="other", tier="none", reason="unknown_model") == 1
        assert count("halftone_requests_total", model="m", tier="fp16", code="413") == 1
        assert count("halftone_requests_total", model="other", tier="none", code="404") == 1

    run_virtually(scenario)


def series(gateway: Any) -> int:
    """How many series the registry holds."""
    return sum(len(metric.samples) for metric in gateway.metrics.registry.collect())


def test_no_number_of_hostile_names_makes_a_series(gateway: Any, run_virtually: Run) -> None:
    """Models, precisions, ids and paths that a client invents."""

    async def scenario() -> None:
        async def hostile(number: int) -> None:
            name = f"n{number}"
            await gateway.call("POST", f"/v2/models/{name}/infer", body())
            await gateway.call("GET", f"/{name}")
            await gateway.infer(("X-Precision", name), ("X-Request-Id", name), id=name)
            await gateway.infer(parameters={"precision": name})
            await gateway.infer(("Content-Type", name))

        await hostile(0)
        before = series(gateway)
        for number in range(1, 100):
            await hostile(number)
        assert series(gateway) == before

    run_virtually(scenario)


# --- whatever arrives -------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(codec=None), max_size=12)
HEADER_NAMES = st.sampled_from(
    [
        "X-Precision",
        "X-Precision-Verify",
        "X-Request-Id",
        "X-Request-Timeout-Seconds",
        "Authorization",
        "Accept",
        "Content-Type",
        "Content-Encoding",
        "Inference-Header-Content-Length",
    ]
)
HEADER_VALUES = st.one_of(
    ANY_TEXT,
    st.sampled_from(["fp32", "true", "1", "0", "1e400", "-1", "gzip", "application/json", "Bearer x"]),
)
PATHS = st.one_of(
    ANY_TEXT,
    st.sampled_from([INFER, INFER, INFER, "/v2/models/m", "/v2/health/ready", "/metrics", "/"]),
    st.builds("/v2/models/{}/infer".format, ANY_TEXT),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {"inputs": st.one_of(st.just([TENSOR]), JSON)},
    optional={
        "id": JSON,
        "outputs": JSON,
        "parameters": st.one_of(
            JSON,
            st.fixed_dictionaries(
                {}, optional={"precision": JSON, "timeout": st.one_of(JSON, st.integers(0, 2**70))}
            ),
        ),
    },
)
BODIES = st.one_of(
    st.binary(max_size=30), st.just(body()), FIELDS.map(lambda fields: json.dumps(fields).encode())
)


@settings(max_examples=300)
@given(
    method=st.sampled_from(["GET", "POST", "POST", "POST", "PUT", "ü\n"]),
    path=PATHS,
    headers=st.lists(st.tuples(HEADER_NAMES, HEADER_VALUES), max_size=4),
    payload=BODIES,
)
def test_whatever_arrives_gets_a_well_formed_answer(
    *,
    make_gateway: Any,
    run_virtually: Run,
    method: str,
    path: str,
    headers: Pairs,
    payload: bytes,
) -> None:
    """`handle` never raises, never blames itself, and leaves nothing behind."""

    async def scenario() -> None:
        gateway = make_gateway()
        response = await gateway.call(method, path, payload, headers)
        answered = dict(response.headers)
        assert response.status < 500
        assert len(answered) == len(response.headers)
        assert all(text.isascii() and text.isprintable() for pair in response.headers for text in pair)
        assert answered["x-request-id"]
        if response.status >= 400:
            refused(response, response.status, json.loads(response.body)["code"])
        assert (await gateway.infer()).status == 200
        gateway.assert_idle()

    run_virtually(scenario)


@given(st.builds(Request, method=ANY_TEXT, path=ANY_TEXT, query=ANY_TEXT, body=st.binary()))
def test_any_request_object_is_answered(make_gateway: Any, run_virtually: Run, request: Request) -> None:
    """Also before anything is ready."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False)
        assert (await gateway.service.handle(request)).status in {200, 404, 405, 503}

    run_virtually(scenario)


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Precision", "")],
        [("X-Precision", "fp61")],
        [("X-Precision", "rel_l2<=0")],
        [("X-Precision", "rel_l2<=")],
        [("X-Precision", "fp32"), ("X-Precision", "fp32")],
    ],
)
def test_a_refused_declaration_is_told_what_is_valid(
    gateway: Any, run_virtually: Run, headers: list[tuple[str, str]]
) -> None:
    """Whatever is wrong with it."""

    async def scenario() -> None:
        reply = await gateway.infer(*headers)
        assert reply.status == 400
        assert "valid: fp32, fp16, critical, standard, or a tolerance" in json.loads(reply.body)["error"]

    run_virtually(scenario)
