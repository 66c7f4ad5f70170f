"""Watching the tiers: reports open a model, failures are shown, changes are noticed."""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.errors import NotReady
from serving.gateway.model import LOST
from serving.gateway.watch import REPORT_INTERVAL_S, REPORT_TIMEOUT_S, take_report, watch_lane
from serving.models.resolve import CallableSource

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]
CUSTOM = """
from serving.models.echo import Echo
class Custom(Echo):
    pass
class Broken(Echo):
    def __init__(self):
        raise OSError("no tokenizer here")
"""


@pytest.fixture
def custom_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with sources of its own, importable by this name."""
    (tmp_path / "custom_sources.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "custom_sources", raising=False)
    return "custom_sources"


async def report(gateway: Any, tier: str = "fp32") -> None:
    """Take one report of a tier."""
    report = await gateway.tiers[tier].report(with_example=True)
    await take_report(gateway.model, gateway.model.lanes[tier], report, gateway.metrics)


def info(gateway: Any) -> list[dict[str, str]]:
    """Labels of every `halftone_tier_info`."""
    return [sample.labels for metric in gateway.metrics.tier_info.collect() for sample in metric.samples]


def test_the_first_report_opens_the_model(make_gateway: Any, run: Run) -> None:
    """With the reported signature and example; only the tier that reported is ready."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False)
        await report(gateway, "fp16")
        assert gateway.model.ready_signature() == gateway.tiers["fp16"].signature
        assert list(gateway.model.example) == ["x"]
        assert gateway.model.problems == {"fp32": "loading"}
        gateway.model.lanes["fp16"].ready_coalescer()

    run(scenario)


def test_a_tier_that_failed_before_it_had_an_example_leaves_it_to_the_others(
    make_gateway: Any, run: Run
) -> None:
    """It may have opened the model already."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False)
        gateway.tiers["fp16"].example = {}
        await report(gateway, "fp16")
        assert gateway.model.example == {}
        await report(gateway, "fp32")
        assert list(gateway.model.example) == ["x"]
        await report(gateway, "fp16")
        assert list(gateway.model.example) == ["x"]

    run(scenario)


def test_the_example_is_asked_for_until_it_is_known(make_gateway: Any, run_virtually: Run) -> None:
    """Images are megabytes, and reports come every second."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False)
        tier = gateway.tiers["fp32"]
        example, tier.example = tier.example, {}
        watching = asyncio.create_task(
            watch_lane(gateway.model, gateway.model.lanes["fp32"], gateway.metrics)
        )
        await asyncio.sleep(2.5 * REPORT_INTERVAL_S)
        assert tier.examples_told == 3
        tier.example = example
        await asyncio.sleep(5 * REPORT_INTERVAL_S)
        assert tier.examples_told == 4
        assert gateway.model.example == example
        watching.cancel()

    run_virtually(scenario)


def test_a_plain_callable_is_not_imported(make_gateway: Any, run: Run) -> None:
    """Its module may need torch; the gateway needs its signature only."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False, model={"source": "not_installed:build"})
        await report(gateway)
        assert isinstance(gateway.model.source, CallableSource)
        assert gateway.model.problems == {"fp16": "loading"}

    run(scenario)


def test_a_source_of_its_own_is_imported(make_gateway: Any, custom_module: str, run: Run) -> None:
    """For its preprocessing and collating."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False, model={"source": f"{custom_module}:Custom"})
        gateway.tiers["fp32"].is_plain = False
        await report(gateway)
        assert type(gateway.model.source).__name__ == "Custom"

    run(scenario)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone:Custom", "cannot import gone"),
        ("custom_sources:Gone", "custom_sources has no Gone"),
        ("custom_sources:Broken", "OSError: no tokenizer here"),
    ],
)
def test_a_source_that_only_the_gateway_cannot_open_is_shown(
    name: str, words: str, make_gateway: Any, custom_module: str, run: Run
) -> None:
    """The tier is fine, yet no request can reach it: that is a failure, not an endless loading."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False, model={"source": name})
        for tier in gateway.tiers.values():
            tier.is_plain = False
        await report(gateway, "fp32")
        await report(gateway, "fp16")
        status, document = await gateway.get("/v2/health/ready")
        assert status == 503
        assert "m/fp32: the gateway cannot open the model: " in document["error"]
        assert document["error"].count(words) == 2
        assert info(gateway) == []
        # No signature is known here, so requests are refused without a look at their bodies.
        assert (await gateway.infer()).status == 503

    run(scenario)


def test_a_source_that_opens_later_heals_the_tier(
    make_gateway: Any, custom_module: str, tmp_path: Path, run: Run
) -> None:
    """The next report tries again."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False, model={"source": "arrives_later:Custom"})
        gateway.tiers["fp32"].is_plain = False
        await report(gateway)
        assert "cannot import" in gateway.model.problems["fp32"]
        (tmp_path / "arrives_later.py").write_text(CUSTOM)
        await report(gateway)
        assert "fp32" not in gateway.model.problems
        assert info(gateway)

    run(scenario)


def test_a_tiers_own_failure_comes_first(make_gateway: Any, run: Run) -> None:
    """Its reason is the one to mend, and it has no signature to open anything with."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False, model={"source": "gone:Custom"})
        tier = gateway.tiers["fp32"]
        tier.description = replace(tier.description, failure="weights of another hash")
        tier.signature, tier.is_plain = None, False
        await report(gateway)
        assert gateway.model.problems["fp32"] == "weights of another hash"
        assert info(gateway) == []
        tier.signature = gateway.source.signature
        await report(gateway)
        assert gateway.model.problems["fp32"] == "weights of another hash"

    run(scenario)


def test_reports_that_arrive_together_open_the_model_once(
    make_gateway: Any, custom_module: str, run: Run
) -> None:
    """A second opening would replace queues that hold requests."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False, model={"source": f"{custom_module}:Custom"})
        opened = []
        really_open = gateway.model.open

        def count(*arguments: Any) -> None:
            opened.append(arguments)
            really_open(*arguments)

        gateway.model.open = count
        for tier in gateway.tiers.values():
            tier.is_plain = False
        await asyncio.gather(report(gateway, "fp32"), report(gateway, "fp16"))
        assert len(opened) == 1
        assert gateway.model.problems == {}

    run(scenario)


def test_the_info_metric_follows_what_a_tier_is(make_gateway: Any, run: Run) -> None:
    """One series for each tier: another precision replaces the old one, a failure removes it."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False)
        tier = gateway.tiers["fp32"]
        await report(gateway)
        await report(gateway)
        expected = {"model": "m", "tier": "fp32", "device": "cpu", "soc": "test-chip"}
        assert info(gateway) == [{**expected, "effective": "fp32-measured"}]
        tier.description = replace(tier.description, effective="hf32")
        await report(gateway)
        assert info(gateway) == [{**expected, "effective": "hf32"}]
        tier.description = replace(tier.description, failure="lost its card")
        await report(gateway)
        assert info(gateway) == []
        tier.description = replace(tier.description, failure=None)
        await report(gateway)
        assert info(gateway) == [{**expected, "effective": "hf32"}]

    run(scenario)


def test_a_lane_is_watched_for_as_long_as_it_runs(
    make_gateway: Any, run_virtually: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """While no replica reports, the tier is not ready and says so; what it was stays true."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False)
        tier, lane = gateway.tiers["fp32"], gateway.model.lanes["fp32"]
        really_report = tier.report
        watching = asyncio.create_task(watch_lane(gateway.model, lane, gateway.metrics))
        await asyncio.sleep(0.1)
        assert lane.problem is None

        async def fail(**_: Any) -> Any:
            raise ConnectionError("no replica")

        tier.report = fail
        await asyncio.sleep(REPORT_INTERVAL_S)
        assert "tier m/fp32: a report did not come: ConnectionError('no replica')" in caplog.text
        assert lane.problem == LOST
        with pytest.raises(NotReady, match="no replica answers"):
            lane.ready_coalescer()
        assert lane.description.effective == "fp32-measured"
        await asyncio.sleep(5 * REPORT_INTERVAL_S)
        assert caplog.text.count("a report did not come") == 1
        tier.description = replace(tier.description, effective="hf32")
        tier.report = really_report
        await asyncio.sleep(REPORT_INTERVAL_S)
        assert lane.description.effective == "hf32"
        assert lane.problem is None
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    with caplog.at_level(logging.WARNING):
        run_virtually(scenario)


def test_a_silent_replica_does_not_hide_the_ones_that_are_connected(
    make_gateway: Any, run_virtually: Run
) -> None:
    """Serve may ask one that hangs while another computes: the tier serves as long as there is one."""

    async def scenario() -> None:
        gateway = make_gateway(is_open=False)
        tier, lane = gateway.tiers["fp32"], gateway.model.lanes["fp32"]
        watching = asyncio.create_task(watch_lane(gateway.model, lane, gateway.metrics))
        await asyncio.sleep(0.1)
        tier.connected = 2
        tier.report = lambda **_: asyncio.sleep(3600)
        await asyncio.sleep(REPORT_INTERVAL_S + REPORT_TIMEOUT_S + 0.1)
        assert lane.is_silent
        assert lane.problem is None
        lane.ready_coalescer()
        tier.connected = 0
        assert lane.problem == LOST
        tier.connected = 1  # Another has started, and its report is still awaited.
        assert lane.problem is None
        watching.cancel()

    run_virtually(scenario)
