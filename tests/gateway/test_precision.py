"""What a gateway makes of what is measured: budgets, tolerances, verification, and rows to compare."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.divergence.standing import Measured, Standing
from serving.gateway.precision import budget_rule
from serving.gateway.tier_client import TierDescription
from serving.tensors import Tensors

Run = Callable[[Callable[[], Any]], Any]
TIERS = {"fp32": {}, "mixed": {}, "fp16": {}}
EVERYTHING = {"sample": 1.0}


@pytest.fixture
def three(make_gateway: Any) -> Any:
    """A gateway of three tiers that compares every row."""
    return make_gateway(model={"tiers": TIERS, "divergence": EVERYTHING})


def learn(gateway: Any, **standings: Standing) -> None:
    """As the hub tells it."""
    gateway.model.precision.learn(standings)


def known(bound: float, samples: int = 1000) -> Standing:
    """A tier that was measured."""
    return Standing(samples=samples, metrics={"rel_l2": Measured(bound / 2, bound)})


def told(response: Any) -> dict[str, str]:
    """A reply's precision headers."""
    return {
        name.removeprefix("x-precision-"): value for name, value in response.headers if "precision" in name
    }


def inferred(gateway: Any, run: Run, *headers: tuple[str, str], **fields: Any) -> Any:
    """One request's response."""

    async def scenario() -> Any:
        return await gateway.infer(*headers, **fields)

    return run(scenario)


def test_traffic_leaves_a_tripped_tier(three: Any, run: Run) -> None:
    """To the next more precise one, whatever was declared but the reference; the reply says why."""
    learn(three, fp16=Standing("tripped"))
    for declared in ("fp16", "standard"):
        reply = told(inferred(three, run, ("X-Precision", declared)))
        assert (reply["tier"], reply["reason"], reply["effective"]) == ("mixed", "budget", "mixed-measured")
    assert told(inferred(three, run, ("X-Precision", "critical")))["reason"] == "class=critical"
    learn(three, fp16=Standing("tripped"), mixed=Standing("tripped"))
    assert told(inferred(three, run))["tier"] == "fp32"
    learn(three)
    assert told(inferred(three, run))["reason"] == "default"
    labels = {"model": "m", "declared": "standard", "tier": "mixed", "reason": "budget"}
    assert three.counted("halftone_routed_total", **labels) == 1


def test_a_tier_that_does_not_serve_is_no_way_out(three: Any, run: Run) -> None:
    """Traffic goes past it, to one that does."""
    learn(three, fp16=Standing("tripped"))
    three.model.lanes["mixed"].description = TierDescription("cpu", "chip", "", unavailable="no such thing")
    assert told(inferred(three, run))["tier"] == "fp32"
    three.model.lanes["mixed"].description = None
    assert told(inferred(three, run))["tier"] == "fp32"


def test_a_probing_tier_gets_its_share(three: Any, run: Run) -> None:
    """By the request's id; the rest goes to the next one."""
    learn(three, fp16=Standing("probing"))

    async def scenario() -> list[tuple[str, str]]:
        found = []
        for number in range(400):
            reply = told(await three.infer(("X-Request-Id", f"r{number}")))
            found.append((reply["tier"], reply["reason"]))
        return found

    answered = run(scenario)
    assert set(answered) == {("fp16", "default"), ("mixed", "budget")}
    assert 20 <= answered.count(("fp16", "default")) <= 65  # A tenth, within four standard errors.


@pytest.mark.parametrize(
    ("standings", "tier"),
    [
        ({}, "fp32"),
        ({"fp16": known(1e-3)}, "fp16"),
        ({"fp16": known(1.1e-3)}, "fp32"),
        ({"fp16": known(2e-3), "mixed": known(1e-4)}, "mixed"),
        ({"fp16": known(float("inf"), samples=5)}, "fp32"),
        ({"fp16": Standing("tripped", metrics=known(1e-5).metrics)}, "fp32"),
        ({"fp16": Standing("probing", metrics=known(1e-5).metrics), "mixed": known(1e-5)}, "mixed"),
    ],
)
def test_a_tolerance_is_kept(three: Any, run: Run, standings: Mapping[str, Standing], tier: str) -> None:
    """By the cheapest tier that is known to; the reply says what is known."""
    learn(three, **standings)
    reply = told(inferred(three, run, ("X-Precision", "rel_l2<=1e-3")))
    assert (reply["tier"], reply["reason"]) == (tier, "tolerance")
    if tier == "fp32":
        assert reply["measured"] == "no other tier is known to keep within this tolerance"
    else:
        assert reply["measured"].endswith(", samples=1000")
        assert float(reply["measured"].split(",")[0].removeprefix("rel_l2<=")) <= 1e-3


def test_a_tolerance_goes_past_a_tier_that_does_not_serve(three: Any, run: Run) -> None:
    """Its caller asked for a divergence, not for that tier."""
    learn(three, fp16=known(1e-5))
    three.model.lanes["fp16"].is_silent = True
    assert told(inferred(three, run, ("X-Precision", "rel_l2<=1e-3")))["tier"] == "fp32"


def compared(gateway: Any, run: Run, *headers: tuple[str, str], requests: int = 3) -> None:
    """Requests, and then what comes of their rows."""

    async def scenario() -> None:
        gateway.model.precision.start()
        for number in range(requests):
            assert (await gateway.infer(("X-Request-Id", f"r{number}"), *headers)).status == 200
        shadow = gateway.model.precision._shadow
        await asyncio.sleep(0.01)
        while shadow.held != (0, 0):  # noqa: ASYNC110  Many steps of other tasks.
            await asyncio.sleep(0.002)
        await gateway.model.precision.stop()

    run(scenario)


def test_a_tier_that_nobody_asks_for_becomes_known_through_tolerances(three: Any, run: Run) -> None:
    """The cheaper ones compute what the reference answers; or no tolerance would ever use them."""
    compared(three, run, ("X-Precision", "rel_l2<=1e-3"))
    figures = three.model.precision.take_figures().tiers
    assert {tier: len(found["rel_l2"]) for tier, found in figures.items()} == {"mixed": 3, "fp16": 3}


def test_a_tripped_tier_is_measured_on(three: Any, run: Run) -> None:
    """Also where another one than the reference answers in its place."""
    learn(three, fp16=Standing("tripped"))
    compared(three, run, ("X-Precision", "fp16"))
    figures = three.model.precision.take_figures().tiers
    assert {tier: len(found["rel_l2"]) for tier, found in figures.items()} == {"mixed": 3, "fp16": 3}
    assert three.counted("halftone_shadow_rows_total", model="m", tier="fp16", outcome="compared") == 3


def test_the_reference_s_own_traffic_is_not_compared(three: Any, run: Run) -> None:
    """With what would it be?"""
    compared(three, run, ("X-Precision", "critical"))
    assert not three.model.precision.take_figures().is_any


@pytest.mark.parametrize(
    "model",
    [
        {"tiers": TIERS, "divergence": {"sample": 0}},
        {"tiers": {"fp32": {}}, "classes": {}, "default": None, "divergence": EVERYTHING},
    ],
)
def test_without_a_sample_or_another_tier_nothing_is_compared(
    make_gateway: Any, run: Run, model: Any
) -> None:
    """And nothing runs."""
    gateway = make_gateway(model=model)

    async def scenario() -> None:
        gateway.model.precision.start()
        assert (await gateway.infer()).status == 200
        await gateway.model.precision.stop()

    run(scenario)
    assert all(tier.rows in ([1], []) for tier in gateway.tiers.values())


def test_a_model_without_a_reference_has_nothing_to_measure(make_gateway: Any, run: Run) -> None:
    """Tolerances, verification and trips are refused, with the reason; its tiers serve."""
    gateway = make_gateway(model={"tiers": {"fp16": {}, "mixed": {}}, "classes": {}, "default": "fp16"})
    assert gateway.model.precision is None
    assert inferred(gateway, run).status == 200

    async def scenario() -> None:
        for headers in ([("X-Precision", "rel_l2<=1")], [("X-Precision-Verify", "true")]):
            response = await gateway.infer(*headers)
            assert response.status == 400
            assert json.loads(response.body)["code"] == "bad_precision"
            assert "no fp32 tier" in json.loads(response.body)["error"]
        assert (await gateway.call("POST", "/v2/models/m/tiers/fp16/trip")).status == 400
        status, document = await gateway.get("/v2/models/m/precision")
        assert (status, document["reference"], document["tiers"]) == (200, None, {})

    run(scenario)
    gateway.assert_idle()


def test_verification_tells_this_very_request_s_divergence(three: Any, run: Run) -> None:
    """Headers and parameters, whichever tier answers."""

    def off(batch: Tensors) -> Tensors:
        return {"y": batch["x"] * np.float32(2.5)}

    three.tiers["fp16"].answer = off
    response = inferred(three, run, ("X-Precision", "fp16"), ("X-Precision-Verify", "TRUE"), rows=3)
    assert told(response)["divergence"] == "rel_l2=0.25, max_abs=1, cosine=1"
    assert told(response)["verdict"] == "fail"
    parameters = json.loads(response.body)["parameters"]
    assert parameters["precision_divergence"] == "rel_l2=0.25, max_abs=1, cosine=1"
    assert parameters["precision_verdict"] == "fail"
    same = inferred(three, run, ("X-Precision", "critical"), ("X-Precision-Verify", "true"))
    assert (told(same)["divergence"], told(same)["verdict"]) == ("rel_l2=0, max_abs=0, cosine=1", "pass")
    assert "divergence" not in told(inferred(three, run, ("X-Precision-Verify", "false")))


@pytest.mark.parametrize("value", ["", "1", "yes", "true,true", "\tno", "wahr"])
def test_verification_is_true_or_false(three: Any, run: Run, value: str) -> None:
    """Anything else is refused, and costs nothing."""
    response = inferred(three, run, ("X-Precision-Verify", value))
    assert (response.status, json.loads(response.body)["code"]) == (400, "bad_precision")
    assert all(tier.rows == [] for tier in three.tiers.values())
    three.assert_idle()


def test_a_reference_of_other_shapes_fails_the_verified_request_only(three: Any, run: Run) -> None:
    """With the model's fault named; nothing is left in a queue."""
    three.tiers["fp32"].answer = lambda batch: {"y": np.ones((len(batch["x"]), 3), np.float32)}
    response = inferred(three, run, ("X-Precision", "fp16"), ("X-Precision-Verify", "true"))
    assert (response.status, json.loads(response.body)["code"]) == (500, "model_error")
    assert inferred(three, run, ("X-Precision", "fp16")).status == 200
    three.assert_idle()


def test_a_reference_that_is_not_ready_refuses_verification(three: Any, run: Run) -> None:
    """Without it the tier still answers."""
    three.model.lanes["fp32"].description = None
    response = inferred(three, run, ("X-Precision", "fp16"), ("X-Precision-Verify", "true"))
    assert (response.status, json.loads(response.body)["code"]) == (503, "not_ready")
    assert inferred(three, run, ("X-Precision", "fp16")).status == 200
    three.assert_idle()


@pytest.mark.parametrize(
    ("request_line", "body", "answer"),
    [
        ("GET tiers/fp16/trip", b"", (405, "method_not_allowed")),
        ("POST tiers/nobody/trip", b"", (404, "unknown_route")),
        ("POST tiers/fp32/trip", b"", (400, "bad_precision")),
        ("POST tiers/fp32/reset", b"", (400, "bad_precision")),
        ("POST tiers/fp16/explode", b"", (404, "unknown_route")),
        ("POST tiers/fp16/trip/more", b"", (404, "unknown_route")),
        ("POST tiers//trip", b"", (404, "unknown_route")),
        ("POST precision", b"", (405, "method_not_allowed")),
        ("POST tiers/fp16/trip", b"{", (400, "bad_json")),
        ("POST tiers/fp16/trip", b"\xff", (400, "bad_json")),
        ("POST tiers/fp16/trip", b"[]", (400, "bad_json")),
        ("POST tiers/fp16/trip", b'{"reason": 7}', (400, "bad_json")),
        ("POST tiers/fp16/trip", b'{"because": "x"}', (400, "bad_json")),
        ("POST tiers/fp16/trip", b"[" * 100_000, (400, "bad_json")),
    ],
)
def test_bad_requests_of_the_tiers_routes(
    three: Any, run: Run, request_line: str, body: bytes, answer: tuple[int, str]
) -> None:
    """Each has its status and code, and sets nothing."""
    method, path = request_line.split()

    async def scenario() -> None:
        response = await three.call(method, f"/v2/models/m/{path}", body)
        assert (response.status, json.loads(response.body)["code"]) == answer
        assert (await three.call(method, f"/v2/models/nobody/{path}", body)).status in {404, 405}

    run(scenario)
    assert three.set_by_hand == []


def test_a_tier_is_set_by_hand(three: Any, run: Run) -> None:
    """The hub is told, with the reason in quotes: it reaches logs and other operators."""

    async def scenario() -> None:
        body = json.dumps({"reason": "new\ndriver " + "x" * 500}).encode()
        for path, sent in (("trip", body), ("reset", b"")):
            response = await three.call("POST", f"/v2/models/m/tiers/fp16/{path}", sent)
            assert response.status == 200
            assert json.loads(response.body) == {"model": "m", "tier": "fp16", "action": path}

    run(scenario)
    (tripped, reset) = three.set_by_hand
    assert tripped[:3] == ("m", "fp16", "trip")
    assert tripped[3].startswith("by hand: 'new\\ndriver xxx")
    assert len(tripped[3]) < 300
    assert reset == ("m", "fp16", "reset", "by hand")


def test_what_is_measured_can_be_read(three: Any, run: Run) -> None:
    """With null for what is not known: JSON has no infinity."""
    standing = Standing(
        "tripped",
        "over",
        is_held=True,
        samples=7,
        ratio=float("inf"),
        metrics={"rel_l2": Measured(0.5, float("inf"))},
        floor={"rel_l2": 1e-7},
    )
    learn(three, fp16=standing)

    async def scenario() -> Any:
        return await three.get("/v2/models/m/precision")

    status, document = run(scenario)
    assert status == 200
    assert document["tiers"]["fp16"] == {
        "state": "tripped",
        "reason": "over",
        "by_hand": True,
        "samples": 7,
        "budget_ratio": None,
        "quantiles": {"rel_l2": 0.5},
        "bounds": {"rel_l2": None},
    }
    assert document["tiers"]["fp32"]["reason"] == "the reference"
    assert document["tiers"]["mixed"]["state"] == "serving"
    assert document["floor"] == {"rel_l2": 1e-7} or document["tiers"]["mixed"]["samples"] == 0
    assert document["reference"] == "fp32"


@given(
    st.dictionaries(st.sampled_from(["mixed", "fp16"]), st.sampled_from(["serving", "tripped", "probing"])),
    st.sampled_from(["fp32", "mixed", "fp16", "critical", "standard"]),
    st.sampled_from([(), ("mixed",)]),
    st.text(max_size=8),
)
def test_no_state_of_the_tiers_lowers_a_request_s_precision(
    make_gateway: Any, states: dict[str, Any], declared: str, lost: tuple[str, ...], request_id: str
) -> None:
    """The invariant, over what a gateway may be told and may have lost."""
    gateway = make_gateway(model={"tiers": TIERS})
    learn(gateway, **{tier: Standing(state) for tier, state in states.items()})
    for tier in lost:
        gateway.model.lanes[tier].is_silent = True
    order = ["fp16", "mixed", "fp32"]
    asked = gateway.model.table.decide(declared)
    decision = gateway.model.precision.within_budget(asked, request_id)
    assert order.index(decision.tier) >= order.index(asked.tier)
    assert states.get(decision.tier, "serving") != "tripped"
    if decision.tier != asked.tier:
        assert decision.tier not in lost


def test_the_budget_is_the_configuration_s(make_gateway: Any) -> None:
    """Field by field."""
    divergence = {
        "metric": "max_abs",
        "budget": 0.5,
        "quantile": 0.9,
        "window": 50,
        "recover_ratio": 0.7,
        "cooldown_s": 3.0,
    }
    rule = budget_rule(make_gateway(model={"divergence": divergence}).config)
    assert (rule.metric, rule.limit, rule.quantile, rule.window) == ("max_abs", 0.5, 0.9, 50)
    assert (rule.min_samples, rule.recover_ratio, rule.cooldown_s) == (50, 0.7, 3.0)
