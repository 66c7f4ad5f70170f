"""The whole server on simulated 910A cards (stub CANN), which have no FP32 products and no infinities."""

from __future__ import annotations

from collections.abc import Iterator

import networks
import numpy as np
import pytest
from card import SATURATING, SimulatedCard
from contract_child import distance, on_cpu, vision_rows
from served import ask, serving
from server_process import ServerProcess

TIERS = [
    "fp16: {resources: {NPU: 1}}",
    "fp32: {resources: {NPU: 1}}",
    "fp32-degraded: {kind: fp32, accept_degraded: true, resources: {NPU: 1}}",
]


@pytest.fixture(scope="module")
def saturating(card: SimulatedCard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A card for each tier."""
    with serving(card, SATURATING, TIERS, tmp_path_factory.mktemp("saturating")) as server:
        yield server


def test_fp32_on_a_card_without_it_is_refused_with_the_reason(
    saturating: ServerProcess,
) -> None:
    """409; the other tiers and the server's readiness do not suffer."""
    refused = ask(saturating, vision_rows(1), "fp32")
    assert (refused.status, refused.json()["code"]) == (409, "precision_unavailable"), refused.body
    assert "FP16 only" in refused.json()["error"]
    assert saturating.call("GET", "/v2/health/ready").status == 200


def test_fp32_accepted_as_it_is_has_its_measured_name(saturating: ServerProcess) -> None:
    """Not the tier's, and not the CPU's answers."""
    x = vision_rows()
    reply = ask(saturating, x, "fp32-degraded")
    assert reply.headers["x-precision-effective"] == "fp32-storage-fp16-cube", reply.body
    assert 1e-6 < distance(reply.array("logits"), on_cpu(networks.vision(), x)) < 5e-3


def test_fp16_saturates_and_says_so(saturating: ServerProcess) -> None:
    """By its measured name."""
    reply = ask(saturating, vision_rows(1))
    assert reply.headers["x-precision-effective"] == "fp16-saturating", reply.body
    assert np.isfinite(reply.array("logits")).all()


def test_a_row_that_saturated_is_refused_where_no_card_has_fp32(saturating: ServerProcess) -> None:
    """Where a 910B1's answer is not finite, a 910A's is, and is wrong."""
    x = np.full((1, 3, 16, 16), 6e4, np.float32)
    x[0, 0, 0, 0] = 0
    reply = ask(saturating, x)
    assert (reply.status, reply.json()["code"]) == (422, "nonfinite_output"), reply.body
