"""Rows that overflowed are answered by the reference or refused, whoever shares their batch."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import DeviceLost, ModelError, TierLost
from serving.gateway.tier_client import OVERFLOW_FLAGS
from serving.tensors import Signature, Tensors, TensorSpec

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]

#: A row that starts with this overflows the 16-bit tier: to infinity, or silently on a saturating card.
INFINITE, CLAMPED = 1000.0, 2000.0
#: A row that starts with this is not finite at FP32 either.
HOPELESS = 3000.0
#: What the 16-bit tier says instead of the doubles.
LIMIT = np.float32(65504)


def narrow(batch: Tensors) -> Tensors:
    """A guarded 16-bit tier: rows [rows, 2], doubled, and their flags."""
    first = batch["x"][:, 0]
    y = batch["x"] * 2
    y[first == INFINITE] = np.inf
    y[first == CLAMPED] = LIMIT
    y[first == HOPELESS] = np.nan
    flags = np.select([first == CLAMPED, np.isin(first, (INFINITE, HOPELESS))], [1, 2], 0)
    return {"y": y, OVERFLOW_FLAGS: flags.astype(np.uint8)}


def reference(batch: Tensors) -> Tensors:
    """The FP32 tier. A tenth more than the 16-bit tier's, to be told from it."""
    y = batch["x"] * 2 + np.float32(0.1)
    y[batch["x"][:, 0] == HOPELESS] = np.nan
    return {"y": y}


@pytest.fixture
def guarded(make_gateway: Any) -> Any:
    """A gateway whose `fp16` overflows on some rows."""
    return with_guard(make_gateway())


def with_guard(gateway: Any) -> Any:
    """Its tiers compute as above."""
    gateway.tiers["fp16"].answer = narrow
    if "fp32" in gateway.tiers:
        gateway.tiers["fp32"].answer = reference
    return gateway


async def ask(gateway: Any, *firsts: float, headers: tuple[tuple[str, str], ...] = ()) -> Any:
    """A request of rows that start with these numbers: status, headers, document."""
    data = [value for first in firsts for value in (first, 1.0)]
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(firsts), 2], "data": data}
    body = json.dumps({"inputs": [tensor]}).encode()
    response = await gateway.call("POST", "/v2/models/m/infer", body, list(headers))
    return response.status, dict(response.headers), json.loads(response.body)


def rows_of(document: Any) -> list[list[float]]:
    """The answer, row by row."""
    (output,) = document["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"]).round(3).tolist()


def escalated(gateway: Any, cause: str) -> float:
    """Rows counted with a cause."""
    return gateway.counted("halftone_escalated_rows_total", model="m", tier="fp16", cause=cause)


@pytest.mark.parametrize(("first", "cause"), [(INFINITE, "nonfinite"), (CLAMPED, "saturated")])
def test_the_overflowed_row_alone_is_computed_again(
    guarded: Any, run_virtually: Run, first: float, cause: str
) -> None:
    """At the reference; headers, body and metrics say so, and the other rows are the tier's own."""

    async def scenario() -> None:
        status, headers, document = await ask(guarded, 1, first, 3)
        assert status == 200
        assert rows_of(document) == [[2, 2], [pytest.approx(2 * first + 0.1), pytest.approx(2.1)], [6, 2]]
        assert guarded.tiers["fp32"].rows == [1]
        said = {"tier": "fp16", "reason": f"escalated={cause}", "escalated-rows": "1"}
        assert {name: headers[f"x-precision-{name}"] for name in said} == said
        assert document["parameters"]["precision_reason"] == f"escalated={cause}"
        assert document["parameters"]["precision_escalated_rows"] == 1
        assert escalated(guarded, cause) == 1

    run_virtually(scenario)
    guarded.assert_idle()


def test_batch_mates_know_nothing_of_it(guarded: Any, run_virtually: Run) -> None:
    """Three requests in one batch: one escalates, one is refused, one gets the tier's answer."""

    async def scenario() -> None:
        replies = await asyncio.gather(ask(guarded, 1), ask(guarded, INFINITE), ask(guarded, HOPELESS))
        assert guarded.tiers["fp16"].rows == [3]
        (well, well_headers, document), (again, again_headers, _), (refused, _, error) = replies
        assert (well, again, refused) == (200, 200, 422)
        assert rows_of(document) == [[2, 2]]
        assert well_headers["x-precision-reason"] == "default"
        assert "x-precision-escalated-rows" not in well_headers
        assert again_headers["x-precision-escalated-rows"] == "1"
        assert error["code"] == "nonfinite_output"

    run_virtually(scenario)
    guarded.assert_idle()


def test_nan_outweighs_saturation_in_the_reason(guarded: Any, run_virtually: Run) -> None:
    """Each row counts under its own cause."""

    async def scenario() -> None:
        status, headers, _ = await ask(guarded, CLAMPED, INFINITE, CLAMPED)
        assert status == 200
        assert headers["x-precision-reason"] == "escalated=nonfinite"
        assert headers["x-precision-escalated-rows"] == "3"
        assert (escalated(guarded, "saturated"), escalated(guarded, "nonfinite")) == (2, 1)

    run_virtually(scenario)


@given(st.lists(st.sampled_from([1.0, 2.0, INFINITE, CLAMPED]), min_size=1, max_size=9), st.integers(1, 4))
def test_whatever_batches_a_request_was_split_over(
    make_gateway: Any, run_virtually: Run, firsts: list[float], max_rows: int
) -> None:
    """Rows come back in order: the reference's where flagged, the tier's elsewhere."""
    gateway = with_guard(make_gateway(tier={"batching": {"max_rows": max_rows}}))

    async def scenario() -> None:
        status, headers, document = await ask(gateway, *firsts)
        assert status == 200
        bad = [first in {INFINITE, CLAMPED} for first in firsts]
        offsets = [0.1 if flagged else 0.0 for flagged in bad]
        wanted = [[2 * first + more, 2 + more] for first, more in zip(firsts, offsets, strict=True)]
        assert np.allclose(rows_of(document), wanted, rtol=1e-6)
        assert headers.get("x-precision-escalated-rows", "0") == str(sum(bad))
        assert sum(gateway.tiers["fp32"].rows) == sum(bad)

    run_virtually(scenario)
    gateway.assert_idle()


def test_without_a_reference_the_request_is_refused(make_gateway: Any, run_virtually: Run) -> None:
    """422, never the clamped answer."""
    model = {"tiers": {"fp16": {}}, "classes": {}, "default": "fp16"}
    gateway = with_guard(make_gateway(model=model))

    async def scenario() -> None:
        for first in (INFINITE, CLAMPED):
            status, _, document = await ask(gateway, first)
            assert (status, document["code"]) == (422, "nonfinite_output")
            assert "no fp32 tier" in document["error"]
        assert (await ask(gateway, 1))[0] == 200

    run_virtually(scenario)


@pytest.mark.parametrize(
    "changed",
    [{"unavailable": "its products take FP16 operands"}, {"effective": "fp32-storage-fp16-cube-emulated"}],
)
def test_a_reference_that_is_as_narrow_is_none(
    guarded: Any, run_virtually: Run, changed: dict[str, str]
) -> None:
    """A 910A's FP32 products saturate too, and no guard would see it."""

    async def scenario() -> None:
        lane = guarded.model.lanes["fp32"]
        lane.description = replace(lane.description, **changed)
        status, _, document = await ask(guarded, CLAMPED)
        assert (status, document["code"]) == (422, "nonfinite_output")
        assert "no FP32 products" in document["error"]
        assert guarded.tiers["fp32"].rows == []

    run_virtually(scenario)


def _overloaded(gateway: Any) -> None:
    lane = gateway.model.lanes["fp32"]
    lane.coalescer.admit(lane.config.max_queue_rows, 0)


def _lost(gateway: Any) -> None:
    gateway.model.lanes["fp32"].is_silent = True


def _loading(gateway: Any) -> None:
    gateway.model.lanes["fp32"].description = None


def _raising(error: Exception) -> Callable[[Any], None]:
    def replace_answer(gateway: Any) -> None:
        def answer(_: Tensors) -> Tensors:
            raise error

        gateway.tiers["fp32"].answer = answer

    return replace_answer


@pytest.mark.parametrize(
    ("spoil", "status", "code"),
    [
        (_overloaded, 503, "overloaded"),
        (_lost, 503, "not_ready"),
        (_loading, 503, "not_ready"),
        (_raising(TierLost("gone")), 503, "tier_lost"),
        (_raising(DeviceLost("gone")), 503, "device_lost"),
        (_raising(ModelError("it raised")), 500, "model_error"),
    ],
)
def test_a_reference_that_cannot_answer_refuses_the_request(
    guarded: Any, run_virtually: Run, spoil: Callable[[Any], None], status: int, code: str
) -> None:
    """Never the overflowed answer instead; rows that did not overflow need no reference."""

    async def scenario() -> None:
        spoil(guarded)
        found, headers, document = await ask(guarded, 1, CLAMPED)
        assert (found, document["code"]) == (status, code)
        assert ("retry-after" in headers) == (status == 503)
        assert (await ask(guarded, 1))[0] == 200

    run_virtually(scenario)


def test_the_reference_s_time_is_the_request_s(guarded: Any, run_virtually: Run) -> None:
    """504 when the deadline passes while the row waits there."""

    async def never(_: Tensors) -> Tensors:
        await asyncio.sleep(3600)
        raise AssertionError

    async def scenario() -> None:
        guarded.tiers["fp32"].answer = never
        status, _, document = await ask(guarded, INFINITE, headers=(("x-request-timeout-seconds", "2"),))
        assert (status, document["code"]) == (504, "deadline")
        await asyncio.sleep(3600)

    run_virtually(scenario)
    guarded.assert_idle()


def test_verification_computes_nothing_twice(guarded: Any, run: Run) -> None:
    """The reference's rows are there already; the verdict is of the answer as it was sent."""

    async def scenario() -> None:
        verify = (("x-precision-verify", "true"),)
        status, headers, document = await ask(guarded, 40, INFINITE, headers=verify)
        assert status == 200
        assert np.allclose(rows_of(document), [[80, 2], [2000.1, 2.1]])
        assert guarded.tiers["fp32"].rows == [2]
        assert headers["x-precision-reason"] == "escalated=nonfinite"
        assert headers["x-precision-verdict"] in {"pass", "warn", "fail"}
        largest = float(headers["x-precision-divergence"].partition("max_abs=")[2].partition(",")[0])
        assert largest == pytest.approx(0.1, rel=1e-3)

    run(scenario)


def test_a_request_at_the_reference_has_no_flags(guarded: Any, run_virtually: Run) -> None:
    """What the FP32 tier says is final."""

    async def scenario() -> None:
        status, headers, document = await ask(guarded, CLAMPED, headers=(("x-precision", "critical"),))
        assert status == 200
        assert headers["x-precision-reason"] == "class=critical"
        assert [output["name"] for output in document["outputs"]] == ["y"]

    run_virtually(scenario)


def test_other_shapes_at_the_reference_are_the_model_s_fault(guarded: Any, run_virtually: Run) -> None:
    """500, and no row of a wrong shape."""

    async def scenario() -> None:
        guarded.tiers["fp32"].answer = lambda batch: {"y": batch["x"][:, :1]}
        status, _, document = await ask(guarded, INFINITE)
        assert (status, document["code"]) == (500, "model_error")

    run_virtually(scenario)


def test_what_may_be_infinite_is_answered_in_binary(make_gateway: Any, run_virtually: Run) -> None:
    """An output that is declared so at FP32; JSON, which cannot say it, is told to ask for binary."""
    gateway = make_gateway(is_open=False)
    gateway.source.signature = Signature(
        (TensorSpec("x", "FP32", (-1, 2), allow_nonfinite=True),),
        (TensorSpec("y", "FP32", (-1, 2), allow_nonfinite=True),),
    )
    gateway.open()
    with_guard(gateway)

    async def scenario() -> None:
        status, _, document = await ask(gateway, HOPELESS)
        assert (status, document["code"]) == (422, "nonfinite_output")
        assert "binary" in document["error"]
        x = np.array([[np.nan, 1.0], [HOPELESS, 2.0]], np.float32)
        head = {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}
            ],
            "parameters": {"binary_data_output": True},
        }
        text = json.dumps(head).encode()
        sent = [("inference-header-content-length", str(len(text)))]
        reply = await gateway.call("POST", "/v2/models/m/infer", text + x.tobytes(), sent)
        assert reply.status == 200
        y = np.frombuffer(reply.body[-16:], np.float32).reshape(2, 2)
        assert np.isnan(y[0, 0])
        assert np.isnan(y[1]).all()
        assert y[0, 1] == 2

    run_virtually(scenario)
