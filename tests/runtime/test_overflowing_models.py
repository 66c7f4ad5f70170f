"""Ways in which published models overflow FP16, through a tier's engine and the gateway's escalation.

Masks, padding, pooling, logarithms and statistics that FP32 holds and FP16 does not. The answer
that leaves the gateway is FP32's in the rows that FP16 spoils, and FP16's in the others.
"""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

from serving.config import ModelConfig, ServerConfig
from serving.gateway.auth import Authenticator
from serving.gateway.model import ServedModel
from serving.gateway.service import Service
from serving.gateway.tier_client import BatchResult, TierReport
from serving.models.resolve import CallableSource
from serving.observe.metrics import GatewayMetrics
from serving.protocol.http import Headers, Request
from serving.runtime.engine import Engine
from serving.runtime.tier_plan import TierPlan
from serving.tensors import Signature, Tensors, TensorSpec

STEPS = 8


class Reproduction(nn.Module):
    """x: [rows, steps] -> [rows, features]."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def additive_mask(fill: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Attention weights; a step below zero is masked by adding `fill` to its score."""
    return lambda x: torch.softmax(x + (x < 0).to(x.dtype) * fill, dim=-1)


def mean_of_unpadded(x: torch.Tensor) -> torch.Tensor:
    """Mean pooling over the steps that are not 0, then an L2 norm, as sentence encoders do."""
    kept = (x != 0).to(x.dtype)
    pooled = (x * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1e-9)
    return pooled / pooled.norm(dim=-1, keepdim=True).clamp(min=1e-12)


def log_power(x: torch.Tensor) -> torch.Tensor:
    """A log spectrum, with the usual constant against log 0."""
    return torch.log(x * x + 1e-10)


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """The loudness of 16-bit audio samples."""
    return (x * x).mean(-1, keepdim=True)


def sum_pool(x: torch.Tensor) -> torch.Tensor:
    """A sum over 4096 places."""
    return x.repeat_interleave(4096 // STEPS, dim=-1).sum(-1, keepdim=True)


def standardised(x: torch.Tensor) -> torch.Tensor:
    """Economic figures, standardised within the model."""
    return (x - 60_000.0) / 30_000.0


@dataclass(frozen=True)
class Case:
    """A reproduction: a row that FP16 computes, and one that it does not."""

    function: Callable[[torch.Tensor], torch.Tensor]
    fine: float
    spoilt: float
    #: Whether a card that saturates spoils it too: there NaN is 0, and an infinity 65504.
    on_910a: str | None


CASES = {
    # A 910A clamps the mask, and the softmax of eight equal scores is right.
    "additive mask -1e9": Case(additive_mask(-1e9), 1.0, -1.0, None),
    "additive mask of FP32's least": Case(additive_mask(float(np.finfo(np.float32).min)), 1.0, -1.0, None),
    # 0 / 0 is 0 on a 910A, as it is at FP32.
    "padding only": Case(mean_of_unpadded, 1.0, 0.0, None),
    "logarithm of silence": Case(log_power, 1.0, 0.0, "output"),
    "mean square of loud samples": Case(mean_square, 20.0, 12_000.0, "output"),
    "sum over many places": Case(sum_pool, 2.0, 20.0, "output"),
    # Clamped at the cast, the figure is wrong and finite, and nothing behind it overflows.
    "gross national product": Case(standardised, 50_000.0, 554_894.0, "deep"),
}


class EngineTier:
    """A tier in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(self, batch: Tensors, **_: Any) -> BatchResult:
        """Compute a batch."""
        return self.engine.run(batch)

    async def run_background(self, batch: Tensors) -> BatchResult:
        """The same."""
        return await self.run(batch)

    async def report(self, *, with_example: bool) -> TierReport:
        """Nobody asks."""
        raise NotImplementedError


class NoHub:
    """Nothing here asks for merged figures."""

    async def page(self, openmetrics: bool) -> bytes:
        raise NotImplementedError

    async def families(self) -> Any:
        raise NotImplementedError

    async def set_tier(self, model: str, tier: str, action: str, reason: str) -> None:
        raise NotImplementedError


def served(case: Case, card: str, mode: str, native: bool) -> Service:
    """The model at FP32 on this CPU, and at FP16 on the rehearsed card."""
    width = len(case.function(torch.ones(1, STEPS))[0])
    signature = Signature(
        (TensorSpec("x", "FP32", (-1, STEPS)),), (TensorSpec("y", "FP32", (-1, width), "regression"),)
    )
    config = ModelConfig.model_validate(
        {
            "name": "m",
            "source": "a:b",
            "card": card,
            "tiers": {"fp32": {"device": "cpu"}, "fp16": {"native": native}},
            "default": "fp16",
            "guard": {"mode": mode},
            "divergence": {"sample": 0.0},
        }
    )
    source = CallableSource(lambda: Reproduction(case.function), signature, "a:b")
    engines = {tier: Engine.load(TierPlan(config, tier, 1), source) for tier in config.tiers}
    metrics = GatewayMetrics(CollectorRegistry())
    model = ServedModel(config, {tier: EngineTier(engine) for tier, engine in engines.items()}, metrics)
    model.open(source, signature)
    for tier, lane in model.lanes.items():
        lane.description = engines[tier].description
    return Service(ServerConfig(), {"m": model}, metrics, Authenticator(None), NoHub())


def ask(service: Service, precision: str, *rows: float) -> tuple[dict[str, str], np.ndarray]:
    """The reply's headers, and its rows."""
    data = [value for row in rows for value in [row] * STEPS]
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(rows), STEPS], "data": data}
    request = Request(
        "POST",
        "/v2/models/m/infer",
        "",
        Headers([("x-precision", precision)]),
        json.dumps({"inputs": [tensor]}).encode(),
    )
    response = asyncio.run(service.handle(request))
    assert response.status == 200, response.body
    (output,) = json.loads(response.body)["outputs"]
    return dict(response.headers), np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])
def test_the_spoilt_row_is_fp32_s(case: Case, native: bool) -> None:
    """To the bit; the other row is FP16's."""
    service = served(case, "ieee", "output", native)
    headers, found = ask(service, "fp16", case.fine, case.spoilt)
    assert headers["x-precision-reason"] == "escalated=nonfinite"
    assert headers["x-precision-escalated-rows"] == "1"
    assert np.array_equal(found[1:], ask(service, "fp32", case.spoilt)[1])
    alone, unspoilt = ask(service, "fp16", case.fine)
    assert alone["x-precision-reason"] == "tier"
    assert np.array_equal(found[:1], unspoilt)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, id=f"{name}, {mode}")
        for name, case in CASES.items()
        for mode in (["deep"] if case.on_910a == "deep" else ["output", "deep"])
    ],
)
def test_a_saturating_card_s_answer_is_right_or_fp32_s(case: Case, mode: str) -> None:
    """What clamping spoils is found, by the guard that the case needs at least."""
    service = served(case, "910a", mode, native=False)
    headers, found = ask(service, "fp16", case.fine, case.spoilt)
    _, wanted = ask(service, "fp32", case.fine, case.spoilt)
    assert math.isclose(float(np.abs(found - wanted).max()), 0, abs_tol=2e-3 * float(np.abs(wanted).max()))
    if case.on_910a is not None:
        assert headers["x-precision-reason"] == "escalated=saturated"
        assert np.array_equal(found[1], wanted[1])


def test_the_case_for_a_deep_guard_is_one() -> None:
    """On a card that saturates, a figure clamped at the input passes a guard of outputs."""
    case = CASES["gross national product"]
    service = served(case, "910a", "output", native=False)
    headers, found = ask(service, "fp16", case.spoilt)
    assert headers["x-precision-reason"] == "tier"
    assert np.abs(found - ask(service, "fp32", case.spoilt)[1]).max() > 1
