"""A rehearsed card on a running server: what it cannot honour is refused, what it computes is named."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import client
import numpy as np
import pytest
from server_process import ServerProcess, ready_server
from wellness import assert_still_well

CONFIG = """
models:
  - name: classifier
    source: mypackage.module:build
    card: 910a
    inputs: [{name: x, dtype: FP32, shape: [-1, 128]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 10], kind: logits}]
    tiers:
      fp16: {}
      fp32: {device: cpu}
      fp32-on-card: {kind: fp32}
      fp32-degraded: {kind: fp32, accept_degraded: true}
    default: fp16
    classes: {critical: fp32, careless: fp32-on-card}
  - name: meddler
    source: mypackage.meddler:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {}}
"""
CLASSIFIER = "/v2/models/classifier/infer"
MEDDLER = "/v2/models/meddler/infer"
#: Two checks of a tier, and a report to the gateway.
CHECKED_AFTER_S = 40.0


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a rehearsed 910A."""
    with ready_server(tmp_path_factory.mktemp("card"), CONFIG) as process:
        yield process


def test_saturation_shows_in_the_answers(card: ServerProcess) -> None:
    """FP16 on a 910A clamps at ±65504 where FP32 goes on; every output is finite."""
    x = np.full((1, 128), 6e4, np.float32)
    body = client.infer_body("x", x)
    fp16 = card.call("POST", CLASSIFIER, body, x_precision="fp16")
    fp32 = card.call("POST", CLASSIFIER, body, x_precision="critical")
    assert fp16.headers["x-precision-effective"] == "fp16-saturating-emulated"
    assert fp32.headers["x-precision-effective"] == "fp32-ieee"
    assert np.abs(fp16.array("y")).max() <= 65504


@pytest.mark.parametrize("declared", ["fp32-on-card", "careless"])
def test_fp32_on_a_card_without_it_is_refused(card: ServerProcess, declared: str) -> None:
    """409 with what was measured; never an answer of less precision."""
    reply = card.call("POST", CLASSIFIER, client.infer_body("x", np.ones((1, 128))), x_precision=declared)
    assert (reply.status, reply.json()["code"]) == (409, "precision_unavailable")
    assert "fp32-storage-fp16-cube" in reply.json()["error"]
    assert card.call("GET", "/v2/health/ready").status == 200
    good = client.infer_body("x", np.ones((1, 128)))
    assert_still_well(card, CLASSIFIER, good, x_precision="critical")


def test_a_degraded_tier_answers_under_its_true_name(card: ServerProcess) -> None:
    """Where the configuration accepts it, each reply says what ran."""
    body = client.infer_body("x", np.ones((1, 128)))
    reply = card.call("POST", CLASSIFIER, body, x_precision="fp32-degraded")
    assert reply.status == 200
    assert reply.headers["x-precision-effective"] == "fp32-storage-fp16-cube-emulated"


def test_a_switch_flipped_by_the_model_takes_its_tier_out_of_service(card: ServerProcess) -> None:
    """The model's own code lowers a switch after the start: the next check finds it."""
    quiet, flip = client.infer_body("x", np.zeros((1, 2))), client.infer_body("x", np.full((1, 2), 13))
    assert card.call("POST", MEDDLER, quiet).status == 200
    assert card.call("POST", MEDDLER, flip).status == 200
    deadline_s = time.monotonic() + CHECKED_AFTER_S
    while card.call("GET", "/v2/health/ready").status == 200:
        assert time.monotonic() < deadline_s, "the flipped switch was not found"
        time.sleep(0.5)
    reason = json.loads(card.call("GET", "/v2/health/ready").body)["error"]
    assert "a switch was changed after the start: float32_matmul_precision is medium" in reason
    assert card.call("POST", MEDDLER, quiet).json()["code"] == "not_ready"
    assert card.call("POST", CLASSIFIER, client.infer_body("x", np.ones((1, 128)))).status == 200
