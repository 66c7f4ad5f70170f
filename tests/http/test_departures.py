"""Models that depart from their tier's precision, on a running server: none answers as if it had not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import client
import numpy as np
import pytest
from server_process import ServerProcess, ready_server

MODEL = """
  - name: {name}
    source: mypackage.departing:{source}
    inputs: [{{name: x, dtype: FP32, shape: [-1, 2]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 2]}}]
    tiers: {tiers}
"""
CONFIG = "models:" + "".join(
    MODEL.format(name=name, source=source, tiers=tiers)
    for name, source, tiers in (
        ("lowered", "lowered", "{fp32: {}, accepted: {kind: fp32, accept_degraded: true}}"),
        ("unconverted", "unconverted", "{fp16: {}, fp32: {}}"),
        ("flips", "flips_a_switch", "{fp32: {}}"),
        ("later", "lowered_later", "{fp32: {}}"),
    )
)
#: Two checks of a tier, and a report to the gateway.
CHECKED_AFTER_S = 40.0
X = np.ones((1, 2))


@pytest.fixture(scope="module")
def departing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of such models."""
    with ready_server(tmp_path_factory.mktemp("departing"), CONFIG) as process:
        yield process


def infer(server: ServerProcess, model: str, tier: str, x: np.ndarray = X) -> client.Reply:
    """One request."""
    return server.call("POST", f"/v2/models/{model}/infer", client.infer_body("x", x), x_precision=tier)


@pytest.mark.parametrize(
    ("model", "tier", "reason"),
    [
        ("lowered", "fp32", "the device computes fp32-ieee, but the model's own code does otherwise: "),
        ("lowered", "fp32", "the model itself runs aten::linear in bf16"),
        ("unconverted", "fp16", "the model itself runs aten::linear in fp32"),
        ("flips", "fp32", "a switch was changed after the start: float32_matmul_precision is medium"),
    ],
)
def test_a_tier_that_its_model_makes_a_lie_of_is_refused(
    departing: ServerProcess, model: str, tier: str, reason: str
) -> None:
    """409, with the operator or the switch; the model's honest tiers answer."""
    reply = infer(departing, model, tier)
    assert (reply.status, reply.json()["code"]) == (409, "precision_unavailable")
    assert reason in reply.json()["error"]
    assert infer(departing, "unconverted", "fp32").headers["x-precision-effective"] == "fp32-ieee"


def test_an_accepted_departure_stands_in_the_name(departing: ServerProcess) -> None:
    """Every reply says that some of the model is BF16."""
    reply = infer(departing, "lowered", "accepted")
    assert reply.status == 200
    assert reply.headers["x-precision-effective"] == "fp32-ieee-with-bf16"


def test_a_module_lowered_after_the_start_takes_its_tier_out_of_service(departing: ServerProcess) -> None:
    """No switch changed and the probe's own modules are exact: the model, watched, betrays itself."""
    assert infer(departing, "later", "fp32").status == 200
    assert infer(departing, "later", "fp32", np.full((1, 2), 13)).status == 200
    deadline_s = time.monotonic() + CHECKED_AFTER_S
    while departing.call("GET", "/v2/health/ready").status == 200:
        assert time.monotonic() < deadline_s, "the lowered module was not found"
        time.sleep(0.5)
    reason = json.loads(departing.call("GET", "/v2/health/ready").body)["error"]
    assert "the probe measures fp32-ieee-with-bf16 now; it was fp32-ieee at the start" in reason
    assert infer(departing, "later", "fp32").json()["code"] == "not_ready"
