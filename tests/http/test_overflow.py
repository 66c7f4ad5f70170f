"""Rows that overflow 16 bits, through a running server: FP32's answer, or a refusal of that request alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import client
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, ready_server
from wellness import assert_still_well

CONFIG = """
models:
  - name: squares
    source: mypackage.overflowing:squares
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {}, fp16: {batching: {max_rows: 4}}}
    default: bulk
    classes: {critical: fp32, bulk: fp16}
  - name: clamped
    source: mypackage.overflowing:squares
    card: 910a
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {device: cpu}, fp16: {}}
  - name: hidden
    source: mypackage.overflowing:hidden
    card: 910a
    guard: {mode: deep}
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {device: cpu}, fp16: {}}
  - name: alone
    source: mypackage.overflowing:squares
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp16: {}}
  - name: logarithm
    source: mypackage.overflowing:logarithm
    inputs: [{name: x, dtype: FP32, shape: [-1, 2], allow_nonfinite: true}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2], allow_nonfinite: true}]
    tiers: {fp32: {}, fp16: {}}
"""
#: Its square is beyond FP16, and beyond FP32.
BIG, HOPELESS = 1000.0, 1e20


@pytest.fixture(scope="module")
def overflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of models that overflow."""
    with ready_server(tmp_path_factory.mktemp("overflow"), CONFIG) as process:
        yield process


def ask(
    server: ServerProcess, model: str, *firsts: float, precision: str = "fp16", **headers: str
) -> client.Reply:
    """Rows that start with these numbers; their second is 2."""
    x = np.array([[first, 2.0] for first in firsts], np.float32)
    path, body = f"/v2/models/{model}/infer", client.infer_body("x", x)
    return server.call("POST", path, body, x_precision=precision, **headers)


def good_request_follows(server: ServerProcess, model: str) -> None:
    """The next request succeeds and the metrics can be read."""
    reply = ask(server, model, 1.5)
    assert reply.status == 200
    assert reply.headers["x-precision-reason"] == "tier"
    body = client.infer_body("x", np.array([[1.5, 2.0]], np.float32))
    assert_still_well(server, f"/v2/models/{model}/infer", body, x_precision="fp16")


def escalated(server: ServerProcess, model: str) -> dict[str, float]:
    """Rows by cause."""
    page = server.call("GET", "/metrics").body.decode()
    return {
        sample.labels["cause"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "halftone_escalated_rows_total" and sample.labels["model"] == model
    }


@pytest.mark.parametrize(
    ("model", "cause"), [("squares", "nonfinite"), ("clamped", "saturated"), ("hidden", "saturated")]
)
def test_one_overflowing_row_is_fp32_s(overflow: ServerProcess, model: str, cause: str) -> None:
    """To the bit, among rows that are FP16's; headers, body and metrics say so."""
    before = escalated(overflow, model).get(cause, 0)
    reply = ask(overflow, model, 1.5, BIG, 3.3)
    assert reply.status == 200
    assert reply.headers["x-precision-tier"] == "fp16"
    assert reply.headers["x-precision-reason"] == f"escalated={cause}"
    assert reply.headers["x-precision-escalated-rows"] == "1"
    parameters = reply.json()["parameters"]
    assert parameters["precision_reason"] == f"escalated={cause}"
    assert parameters["precision_escalated_rows"] == 1
    found = reply.array("y")
    assert np.array_equal(found[1:2], ask(overflow, model, BIG, precision="fp32").array("y"))
    own = ask(overflow, model, 1.5, 3.3)
    assert own.headers["x-precision-reason"] == "tier"
    assert np.array_equal(found[[0, 2]], own.array("y"))
    assert not np.array_equal(own.array("y"), ask(overflow, model, 1.5, 3.3, precision="fp32").array("y"))
    assert escalated(overflow, model)[cause] == before + 1
    good_request_follows(overflow, model)


def test_rows_of_a_request_that_travelled_in_many_batches(overflow: ServerProcess) -> None:
    """Batches hold four rows; each bad one is found in its own."""
    firsts = [BIG if row % 3 == 0 else 1.5 for row in range(10)]
    reply = ask(overflow, "squares", *firsts)
    assert reply.status == 200
    assert reply.headers["x-precision-escalated-rows"] == "4"
    wanted = np.array([[first * first, 4.0] for first in firsts], np.float32)
    assert np.array_equal(reply.array("y"), wanted)


def test_what_fp32_cannot_hold_refuses_its_own_request(overflow: ServerProcess) -> None:
    """422 for that one, while thirty others share its batches."""
    firsts = [HOPELESS if number % 10 == 0 else 1.5 for number in range(33)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda first: ask(overflow, "squares", first), firsts))
    for first, reply in zip(firsts, replies, strict=True):
        if first == HOPELESS:
            assert (reply.status, reply.json()["code"]) == (422, "nonfinite_output")
        else:
            assert reply.status == 200
            assert np.array_equal(reply.array("y"), [[2.25, 4.0]])
            assert reply.headers["x-precision-reason"] == "tier"
    good_request_follows(overflow, "squares")


def test_without_a_reference_an_overflow_is_refused(overflow: ServerProcess) -> None:
    """422: the infinity is not sent."""
    reply = ask(overflow, "alone", 1.5, BIG)
    assert (reply.status, reply.json()["code"]) == (422, "nonfinite_output")
    assert "no fp32 tier" in reply.json()["error"]
    good_request_follows(overflow, "alone")


def test_a_verified_request_is_compared_as_it_was_answered(overflow: ServerProcess) -> None:
    """An escalated row does not diverge."""
    reply = ask(overflow, "squares", BIG, x_precision_verify="true")
    assert reply.status == 200
    assert reply.headers["x-precision-reason"] == "escalated=nonfinite"
    assert "max_abs=0," in reply.headers["x-precision-divergence"]
    assert reply.headers["x-precision-verdict"] == "pass"


def test_the_reference_s_own_answers_are_not_escalated(overflow: ServerProcess) -> None:
    """By class or by name."""
    for precision in ("critical", "fp32"):
        reply = ask(overflow, "squares", BIG, precision=precision)
        assert reply.status == 200
        assert reply.headers["x-precision-tier"] == "fp32"
        assert "x-precision-escalated-rows" not in reply.headers


def test_legitimate_infinities_are_sent_in_binary(overflow: ServerProcess) -> None:
    """In and out, where the configuration declares them; JSON is told to ask for binary."""
    refused = ask(overflow, "logarithm", 0.0)
    assert (refused.status, refused.json()["code"]) == (422, "nonfinite_output")
    assert "binary" in refused.json()["error"]
    x = np.array([[0.0, 1.0], [np.inf, np.nan]], np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    reply = overflow.call(
        "POST",
        "/v2/models/logarithm/infer",
        head + x.tobytes(),
        x_precision="fp16",
        content_type="application/octet-stream",
        inference_header_content_length=str(len(head)),
    )
    assert reply.status == 200
    y = np.frombuffer(reply.body[-x.nbytes :], np.float32).reshape(2, 2)
    assert np.array_equal(y, [[-np.inf, 0.0], [np.inf, np.nan]], equal_nan=True)
    good_request_follows(overflow, "logarithm")
