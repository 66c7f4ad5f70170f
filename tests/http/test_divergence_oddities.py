"""Live divergence where there is little to compare, or where something breaks: callers notice nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import client
import numpy as np
import pytest
from prometheus_page import Page
from server_process import ServerProcess, ready_server

CONFIG = """
models:
  - name: labels
    source: mypackage.oddities:labels
    inputs: [{name: x, dtype: FP32, shape: [-1, 4]}]
    outputs: [{name: label, dtype: INT64, shape: [-1]}, {name: wide, dtype: INT64, shape: [-1, 1]}]
    tiers: {fp32: {}, fp16: {}}
    divergence: {sample: 1.0, min_samples: 5, cooldown_s: 0}
  - name: empty
    source: mypackage.oddities:empty
    inputs: [{name: x, dtype: FP32, shape: [-1, 4]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, -1], kind: logits}]
    tiers: {fp32: {}, fp16: {}}
    divergence: {sample: 1.0}
  - name: huge
    source: mypackage.oddities:huge
    inputs: [{name: x, dtype: FP32, shape: [-1, 4]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2621440]}]
    tiers: {fp32: {}, fp16: {}}
    divergence: {sample: 1.0}
  - name: square
    source: mypackage.oddities:square
    inputs: [{name: x, dtype: FP32, shape: [-1, 4]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, -1]}]
    tiers: {fp32: {}, fp16: {}}
    divergence: {sample: 1.0}
  - name: slow
    source: mypackage.slow:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 4]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 4]}]
    tiers: {fp32: {}, fp16: {}}
    divergence: {sample: 1.0, window: 1, quantile: 0.5, shadow: {max_age_s: 60}}
  - name: lone
    source: mypackage.module:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 128]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 10]}]
    tiers: {fp32: {}}
    divergence: {sample: 1.0}
  - name: halves
    source: mypackage.module:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 128]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 10]}]
    tiers: {fp16: {}, bf16: {}}
    divergence: {sample: 1.0}
  - name: refless
    source: mypackage.module:build
    card: 910a
    inputs: [{name: x, dtype: FP32, shape: [-1, 128]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 10]}]
    tiers: {fp32: {}, fp16: {}}
    divergence: {sample: 1.0}
"""
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all of them."""
    with ready_server(tmp_path_factory.mktemp("odd"), CONFIG) as process:
        yield process


def page(server: ServerProcess) -> Page:
    """A scrape, which parses."""
    reply = server.call("GET", "/metrics")
    assert reply.status == 200
    return Page.parse(reply.body.decode())


def outcome(server: ServerProcess, model: str, of: str) -> float:
    """Sampled rows of its FP16 tier that this became of."""
    return page(server).total("halftone_shadow_rows_total", model=model, tier="fp16", outcome=of)


def wait_for(condition: Callable[[], Any]) -> None:
    """Until it comes true."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come true"
        time.sleep(0.1)


def infer(server: ServerProcess, model: str, x: np.ndarray, **headers: str) -> client.Reply:
    """One request."""
    return server.call("POST", f"/v2/models/{model}/infer", client.infer_body("x", x), **headers)


def code(reply: client.Reply) -> tuple[int, str]:
    """Status and code of a refusal."""
    return reply.status, reply.json()["code"]


def test_integer_outputs(odd: ServerProcess) -> None:
    """A label that FP16 turns is a large error; the budget on it acts."""
    near = np.array([[0.0, 1.0, 1.0001, 0.0]] * 5, np.float32)  # FP16 cannot tell the two apart.
    reply = infer(odd, "labels", near, x_precision="fp16", x_precision_verify="true")
    assert reply.status == 200
    assert "max_abs=1" in reply.headers["x-precision-divergence"]
    assert reply.headers["x-precision-verdict"] == "fail"
    wait_for(lambda: outcome(odd, "labels", "compared") >= 5)
    wait_for(lambda: infer(odd, "labels", near, x_precision="fp16").headers["x-precision-reason"] == "budget")
    labels = {"model": "labels", "tier": "fp16", "output": "wide"}
    assert page(odd).total("halftone_divergence_count", **labels, metric="ulp") == 0
    assert page(odd).total("halftone_divergence_sum", **labels, metric="max_abs") >= 5


def test_outputs_of_no_elements(odd: ServerProcess) -> None:
    """Nothing is no divergence, for logits too."""
    before = outcome(odd, "empty", "compared")
    reply = infer(odd, "empty", np.ones((3, 4), np.float32), x_precision="fp16", x_precision_verify="true")
    assert reply.status == 200
    assert reply.headers["x-precision-divergence"] == "rel_l2=0, max_abs=0, cosine=1"
    assert reply.headers["x-precision-verdict"] == "pass"
    wait_for(lambda: outcome(odd, "empty", "compared") >= before + 3)
    assert outcome(odd, "empty", "failed") == 0


def test_rows_of_ten_mebibytes(odd: ServerProcess) -> None:
    """They are compared in small batches, within the memory that may be held."""
    before = outcome(odd, "huge", "compared")
    wanted = b'"outputs":[{"name":"y","parameters":{"binary_data":true}}]'
    body = client.infer_body("x", np.ones((3, 4), np.float32))[:-1] + b"," + wanted + b"}"
    reply = odd.call("POST", "/v2/models/huge/infer", body, x_precision="fp16")
    assert reply.status == 200
    assert len(reply.body) > 3 * 10_000_000
    wait_for(lambda: outcome(odd, "huge", "compared") >= before + 3)
    assert outcome(odd, "huge", "dropped") == 0


def test_a_model_whose_shapes_depend_on_the_batch(odd: ServerProcess) -> None:
    """Its rows fail to be compared where the batch is another one; callers get theirs."""
    for rows in (1, 2, 3, 5) * 4:
        assert infer(odd, "square", np.ones((rows, 4), np.float32), x_precision="fp16").status == 200

    def is_settled() -> bool:
        seen = [outcome(odd, "square", of) for of in ("compared", "failed", "dropped")]
        return sum(seen) >= 44

    wait_for(is_settled)
    assert outcome(odd, "square", "compared") + outcome(odd, "square", "failed") >= 44
    assert odd.output.count("rows of tier fp16 cannot be compared") < 44


def test_a_model_with_only_fp32(odd: ServerProcess) -> None:
    """There is nothing to compare; verification compares it with itself."""
    x = np.ones((2, 128), np.float32)
    reply = infer(odd, "lone", x, x_precision="rel_l2<=1e-9", x_precision_verify="true")
    assert (reply.status, reply.headers["x-precision-tier"]) == (200, "fp32")
    assert reply.headers["x-precision-verdict"] == "pass"
    document = odd.call("GET", "/v2/models/lone/precision").json()
    assert document["tiers"] == {"fp32": {"state": "serving", "reason": "the reference"}}
    assert code(odd.call("POST", "/v2/models/lone/tiers/fp32/trip")) == (400, "bad_precision")


def test_a_model_without_fp32(odd: ServerProcess) -> None:
    """Its tiers serve; whatever needs a reference is refused with the reason."""
    x = np.ones((2, 128), np.float32)
    assert infer(odd, "halves", x, x_precision="fp16").status == 200
    for headers in ({"x_precision": "rel_l2<=1"}, {"x_precision_verify": "true"}):
        reply = infer(odd, "halves", x, **headers)
        assert code(reply) == (400, "bad_precision")
        assert "no fp32 tier" in reply.json()["error"]
    assert code(odd.call("POST", "/v2/models/halves/tiers/fp16/trip")) == (400, "bad_precision")
    assert odd.call("GET", "/v2/models/halves/precision").json()["reference"] is None


def test_a_reference_that_the_card_cannot_honour(odd: ServerProcess) -> None:
    """FP16 serves, unmeasured: sampled rows are dropped at once, and what needs the reference is 409."""
    x = np.ones((2, 128), np.float32)
    before = outcome(odd, "refless", "dropped")
    assert infer(odd, "refless", x, x_precision="fp16").status == 200
    wait_for(lambda: outcome(odd, "refless", "dropped") >= before + 2)
    for headers in ({"x_precision": "rel_l2<=1"}, {"x_precision": "fp16", "x_precision_verify": "true"}):
        assert code(infer(odd, "refless", x, **headers)) == (409, "precision_unavailable")
    assert odd.call("GET", "/v2/models/refless/precision").json()["tiers"]["fp16"]["samples"] == 0


def test_a_reference_that_is_killed_in_a_background_batch(odd: ServerProcess) -> None:
    """FP16's callers get their answers, and the rows are compared once there is another replica."""
    x = np.ones((1, 4), np.float32)
    before = {of: outcome(odd, "slow", of) for of in ("compared", "failed", "dropped")}
    assert infer(odd, "slow", x, x_precision="fp16").status == 200
    time.sleep(0.5)  # The reference takes a second.
    [replica] = odd.replicas("halftone:slow:fp32")
    os.kill(replica, signal.SIGKILL)
    assert infer(odd, "slow", x, x_precision="fp16").status == 200
    wait_for(lambda: odd.replicas("halftone:slow:fp32") not in ([], [replica]))
    wait_for(lambda: odd.call("GET", "/v2/models/slow/ready").status == 200)
    assert infer(odd, "slow", x, x_precision="fp16").status == 200

    def settled() -> bool:
        return sum(outcome(odd, "slow", of) - was for of, was in before.items()) >= 3

    wait_for(settled)
    assert outcome(odd, "slow", "compared") >= before["compared"] + 2
    assert outcome(odd, "slow", "failed") == before["failed"]
    # A report that the dead replica owed is given up after five seconds, when another may serve already.
    wait_for(lambda: odd.call("GET", "/v2/health/ready").status == 200)


def test_the_page_parses_after_all_of_it(odd: ServerProcess) -> None:
    """And every sum on it is a number."""
    scraped = page(odd)
    sums = [value for (name, _), value in scraped.samples.items() if name.endswith("_sum")]
    assert sums
    assert np.isfinite(sums).all()
    assert odd.call("GET", "/v2/health/ready").status == 200
