"""A tier under more load than it carries: what is bounded, who is refused, and who gets whose turn."""

import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.divergence.standing import Standing
from serving.gateway.tier_client import OVERFLOW_FLAGS
from serving.models.source import ModelSource
from serving.tensors import Signature, Tensors, TensorSpec

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]
MODEL = {
    "classes": {"critical": "fp32", "elastic": {"tier": "fp32", "may_degrade_to": "fp16"}},
    "default": "elastic",
}


@pytest.fixture
def elastic(make_gateway: Any) -> Any:
    """A gateway with a class that may degrade, and one that may not."""
    return make_gateway(model=MODEL, tier={"max_queue_rows": 4})


def fill(gateway: Any, tier: str) -> None:
    """As if the tier's queue were full."""
    lane = gateway.model.lanes[tier]
    lane.coalescer.admit(lane.config.max_queue_rows, 0)


def lose(gateway: Any, tier: str) -> None:
    """As if no replica answered."""
    gateway.model.lanes[tier].is_silent = True


async def ask(gateway: Any, precision: str | None) -> tuple[int, str, str]:
    """Status, and the tier and reason that the reply says; of a refusal, its code."""
    response = await gateway.infer(*([("x-precision", precision)] if precision else []))
    headers, document = dict(response.headers), json.loads(response.body)
    if response.status != 200:
        return response.status, document["code"], ""
    parameters = document["parameters"]
    found = headers["x-precision-tier"], headers["x-precision-reason"]
    assert found == (parameters["precision_tier"], parameters["precision_reason"])
    return response.status, *found


# --- the way down -----------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [fill, lose])
def test_a_class_that_may_degrade_does_and_says_so(
    elastic: Any, run_virtually: Run, spoil: Callable[[Any, str], None]
) -> None:
    """While its tier is full or lost, and then only. So do requests whose default it is."""

    async def scenario() -> None:
        assert await ask(elastic, "elastic") == (200, "fp32", "class=elastic")
        spoil(elastic, "fp32")
        assert await ask(elastic, "elastic") == (200, "fp16", "degraded")
        assert await ask(elastic, None) == (200, "fp16", "degraded")
        assert elastic.counted(
            "halftone_routed_total", model="m", declared="elastic", tier="fp16", reason="degraded"
        )

    run_virtually(scenario)


@pytest.mark.parametrize(("spoil", "code"), [(fill, "overloaded"), (lose, "not_ready")])
def test_nobody_else_degrades(
    elastic: Any, run_virtually: Run, spoil: Callable[[Any, str], None], code: str
) -> None:
    """Neither a class without permission, nor a tier by name, nor a tolerance."""

    async def scenario() -> None:
        spoil(elastic, "fp32")
        for declared in ("critical", "fp32", "rel_l2<=1e-9"):
            assert await ask(elastic, declared) == (503, code, "")

    run_virtually(scenario)


def test_a_lower_tier_that_is_full_too_refuses(elastic: Any, run_virtually: Run) -> None:
    """With the own tier's refusal."""

    async def scenario() -> None:
        fill(elastic, "fp32")
        fill(elastic, "fp16")
        assert await ask(elastic, "elastic") == (503, "overloaded", "")

    run_virtually(scenario)


def test_a_tier_over_its_budget_is_no_way_down(elastic: Any, run_virtually: Run) -> None:
    """It was taken out of service for being too far from the reference."""

    async def scenario() -> None:
        fill(elastic, "fp32")
        elastic.model.precision.learn({"fp16": replace(Standing(), state="tripped")})
        assert await ask(elastic, "elastic") == (503, "overloaded", "")

    run_virtually(scenario)


def test_an_escalated_row_does_not_hide_that_the_others_are_degraded(
    elastic: Any, run_virtually: Run
) -> None:
    """The reason stays; the header counts the rows."""

    def overflowing(batch: Tensors) -> Tensors:
        flags = np.zeros(len(batch["x"]), np.uint8)
        flags[0] = 2
        return {"y": batch["x"] * 2, OVERFLOW_FLAGS: flags}

    async def scenario() -> None:
        elastic.tiers["fp16"].answer = overflowing
        lane = elastic.model.lanes["fp32"]
        lane.coalescer.admit(3, 0)
        response = await elastic.infer(("x-precision", "elastic"), rows=2)
        headers = dict(response.headers)
        assert headers["x-precision-reason"] == "degraded"
        assert headers["x-precision-escalated-rows"] == "1"

    run_virtually(scenario)


@given(
    st.sampled_from([None, "elastic", "critical", "fp32", "fp16"]),
    st.sets(st.sampled_from(["fp32", "fp16"])),
    st.sets(st.sampled_from(["fp32", "fp16"])),
)
def test_a_sensitive_request_is_never_answered_by_less(
    make_gateway: Any, run_virtually: Run, declared: str | None, full: set[str], lost: set[str]
) -> None:
    """Whatever is full or lost."""
    gateway = make_gateway(model=MODEL, tier={"max_queue_rows": 4})

    async def scenario() -> None:
        for tier in full:
            fill(gateway, tier)
        for tier in lost:
            lose(gateway, tier)
        status, tier, reason = await ask(gateway, declared)
        if status != 200:
            assert status == 503
        elif tier == "fp16":
            assert declared == "fp16" or (reason == "degraded" and declared in {None, "elastic"})
            assert declared == "fp16" or "fp32" in full | lost
        else:
            assert reason != "degraded"

    run_virtually(scenario)


# --- bytes ------------------------------------------------------------------------------------


class Swelling(ModelSource):
    """A name becomes a picture: preprocessing makes a thousand times as many bytes."""

    signature = Signature(
        inputs=(TensorSpec("x", "FP32", (-1, 2)),), outputs=(TensorSpec("y", "FP32", (-1, 2), "regression"),)
    )

    def build(self) -> Any:
        raise NotImplementedError

    def examples(self) -> Tensors:
        return {"x": np.array([[1.0, 2.0]], np.float32)}

    def preprocess(self, inputs: Tensors) -> Tensors:
        return {"x": np.repeat(inputs["x"], 1000, axis=1)}


def test_preprocessed_tensors_count_as_large_as_they_are(make_gateway: Any, run: Run) -> None:
    """They are refused where the request itself had room; nothing stays reserved."""
    gateway = make_gateway(source=Swelling(), tier={"max_queue_bytes": 20_000})
    gateway.tiers["fp16"].answer = lambda batch: {"y": batch["x"][:, :2] * 2}

    async def scenario() -> None:
        assert (await gateway.infer(rows=2)).status == 200
        response = await gateway.infer(rows=3)
        assert (response.status, json.loads(response.body)["code"]) == (503, "overloaded")
        assert (await gateway.infer(rows=2)).status == 200

    run(scenario)
    gateway.assert_idle()
    assert all(lane.coalescer.queue_bytes == 0 for lane in gateway.model.lanes.values())


def test_more_bytes_than_a_queue_holds_are_too_large(make_gateway: Any, run_virtually: Run) -> None:
    """413: waiting would not help."""
    gateway = make_gateway(tier={"max_queue_bytes": 1024})

    async def scenario() -> None:
        response = await gateway.infer(rows=129)
        assert (response.status, json.loads(response.body)["code"]) == (413, "too_large")
        assert (await gateway.infer(rows=128)).status == 200

    run_virtually(scenario)
    gateway.assert_idle()
