"""Real models that FP16 ruins in silence, through the whole server: kept right, refused, or plainly wrong."""

from __future__ import annotations

from collections.abc import Iterator

import client
import numpy as np
import pytest
from pitch_tracker import breathy_voice, cents_off
from server_process import ServerProcess, ready_server
from tumour_classifier import train, tumours

CONFIG = """
models:
  - name: pitch
    source: pitch_tracker:PitchTracker
    tiers:
      fp32: {{}}
      fp16: {{}}
      strict: {{kind: fp16, on_weight_loss: refuse}}
  - name: tumours
    source: tumour_classifier:build
    weights: {weights}
    inputs: [{{name: x, dtype: FP32, shape: [-1, 30]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 2], kind: logits}}]
    tiers:
      fp32: {{}}
      fp16: {{}}
      mixed: {{keep_fp32: [front]}}
"""
FRAMES = 6


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of both."""
    folder = tmp_path_factory.mktemp("ruined")
    train(folder / "weights.safetensors")
    with ready_server(folder, CONFIG.format(weights=folder / "weights.safetensors")) as process:
        yield process


def test_the_pitch_tracker_s_fp16_tier_gives_the_fp32_answers(ruined: ServerProcess) -> None:
    """The module with 64 variances that FP16 cannot hold stays FP32, and the model's page says so."""
    frames, pitch_hz = breathy_voice(FRAMES)
    body = client.infer_body("frame", frames)
    pitches = {}
    for tier, effective in (("fp32", "fp32-ieee"), ("fp16", "fp16-emulated")):
        reply = ruined.call("POST", "/v2/models/pitch/infer", body, x_precision=tier)
        assert reply.headers["x-precision-effective"] == effective
        pitches[tier] = reply.array("pitch")
    assert (pitches["fp16"].argmax(1) == pitches["fp32"].argmax(1)).all()
    assert not np.array_equal(pitches["fp16"], pitches["fp32"])
    assert (cents_off(pitches["fp16"], pitch_hz) < 50).all()
    page = ruined.call("GET", "/v2/models/pitch").body.decode()
    assert "conv2_BN.running_var: of 128 values 64 become infinite" in page


def test_the_pitch_tracker_is_refused_where_no_weight_may_be_lost(ruined: ServerProcess) -> None:
    """409 with the counts; the other tiers serve."""
    body = client.infer_body("frame", breathy_voice(1)[0])
    reply = ruined.call("POST", "/v2/models/pitch/infer", body, x_precision="strict")
    assert (reply.status, reply.json()["code"]) == (409, "precision_unavailable")
    assert "conv2_BN.running_var: of 128 values 64 become infinite" in reply.json()["error"]
    assert "the largest is 497160" in reply.json()["error"]
    assert ruined.call("GET", "/v2/health/ready").status == 200


@pytest.mark.parametrize(
    ("tier", "low", "high"), [("fp32", 0.92, 0.97), ("fp16", 0, 0.45), ("mixed", 0.92, 0.97)]
)
def test_the_tumour_classifier_s_accuracy(ruined: ServerProcess, tier: str, low: float, high: float) -> None:
    """FP16 is no better than a guess though all its logits are finite; with the front in FP32 it is right."""
    _, held_out = tumours()
    reply = ruined.call(
        "POST", "/v2/models/tumours/infer", client.infer_body("x", held_out.measures), x_precision=tier
    )
    assert reply.status == 200
    assert reply.headers["x-precision-tier"] == tier
    logits = reply.array("y")
    assert np.isfinite(logits).all()
    assert low <= held_out.accuracy(logits) <= high
