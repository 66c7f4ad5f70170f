"""A gateway without sockets, Ray or torch, and an event loop whose seconds cost nothing."""

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from serving.config import ModelConfig, ServerConfig
from serving.errors import NotReady
from serving.gateway.auth import Authenticator
from serving.gateway.model import ServedModel
from serving.gateway.service import Service
from serving.gateway.tier_client import BatchResult, TierDescription, TierReport
from serving.models.source import ModelSource
from serving.observe.hub import Hub
from serving.observe.metrics import GatewayMetrics
from serving.observe.snapshot import Family, take_snapshot
from serving.protocol.http import Headers, Request, Response
from serving.tensors import Signature, Tensors, TensorSpec


class _JumpingSelector(selectors.SelectSelector):
    """Polls. Whenever all tasks wait, its loop's clock jumps to the next timer."""

    def __init__(self, waited: Callable[[float], None]) -> None:
        super().__init__()
        self._waited = waited

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready now."""
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that never happens"
            self._waited(timeout)
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose seconds cost nothing. For code that waits on nothing outside its own loop."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_JumpingSelector(self._pass))

    def _pass(self, seconds: float) -> None:
        self.now_s += max(0.0, seconds)

    def time(self) -> float:
        """The loop's own clock."""
        return self.now_s


Scenario = Callable[[], Coroutine[Any, Any, Any]]


async def _leaving_nothing(scenario: Scenario) -> Any:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    try:
        result = await scenario()
        for _ in range(5):
            await asyncio.sleep(0)
        left = _other_tasks()
        assert not left, f"tasks are left: {left}"
        assert not faults
        return result
    finally:
        # Only after a failure is there anything; it must not spoil the tests that follow.
        while others := _other_tasks():
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


def _other_tasks() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


@pytest.fixture(scope="session")
def run_virtually() -> Callable[[Scenario], Any]:
    """Runs a coroutine function on a virtual clock; no task and no unseen error may be left."""

    def run_virtually(scenario: Scenario) -> Any:
        with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
            return runner.run(_leaving_nothing(scenario))

    return run_virtually


@pytest.fixture(scope="session")
def run() -> Callable[[Scenario], Any]:
    """The same on a real clock, for code that uses threads."""

    def run(scenario: Scenario) -> Any:
        async def in_time() -> Any:
            async with asyncio.timeout(20):
                return await scenario()

        return asyncio.run(_leaving_nothing(in_time))

    return run


class Pairs(ModelSource):
    """Two numbers in, their doubles out."""

    signature = Signature(
        inputs=(TensorSpec("x", "FP32", (-1, 2)),), outputs=(TensorSpec("y", "FP32", (-1, 2), "regression"),)
    )

    def build(self) -> Any:
        """Never here."""
        raise NotImplementedError

    def examples(self) -> Tensors:
        """One row."""
        return {"x": np.array([[1.0, 2.0]], np.float32)}


class MemoryTier:
    """A tier in memory. `answer` computes; a test replaces it to wait, to fail or to be wrong."""

    def __init__(self, effective: str) -> None:
        self.answer: Callable[[Tensors], Any] = lambda batch: {"y": batch["x"] * 2}
        self.description = TierDescription("cpu", "test-chip", effective)
        self.signature: Signature | None = Pairs.signature
        self.example = Pairs().examples()
        self.examples_told = 0
        self.is_plain = True
        self.rows: list[int] = []
        self.is_busy = False
        self.connected = 0

    async def run(self, batch: Tensors, **_: Any) -> BatchResult:
        """Compute a batch."""
        self.rows.append(len(batch["x"]))
        outputs = self.answer(batch)
        if asyncio.iscoroutine(outputs):
            outputs = await outputs
        return BatchResult(outputs, 0.001)

    async def run_background(self, batch: Tensors) -> BatchResult:
        """The same, when nothing else is under way: a test says when that is not so."""
        if self.is_busy:
            raise NotReady("busy")
        return await self.run(batch)

    async def report(self, *, with_example: bool) -> TierReport:
        """What it is."""
        self.examples_told += with_example
        return TierReport(
            self.description, self.signature, self.example if with_example else {}, self.is_plain
        )


class Gateway:
    """One model `m` with the tiers `fp32` and `fp16`, and the service around it."""

    def __init__(
        self,
        *,
        source: ModelSource | None = None,
        tokens: dict[str, str] | None = None,
        is_open: bool = True,
        tier: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **server: Any,
    ) -> None:
        self.config = ModelConfig.model_validate(
            {
                "name": "m",
                "source": "pairs:Pairs",
                "tiers": {"fp32": tier or {}, "fp16": tier or {}},
                "classes": {"critical": "fp32", "standard": "fp16"},
                "default": "standard",
                **(model or {}),
            }
        )
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.tiers = {name: MemoryTier(f"{name}-measured") for name in self.config.tiers}
        self.model = ServedModel(self.config, dict(self.tiers), self.metrics)
        self.source = source or Pairs()
        self.hub = Hub()
        self.set_by_hand: list[tuple[str, str, str, str]] = []
        self.service = Service(
            ServerConfig.model_validate(server),
            {"m": self.model},
            self.metrics,
            Authenticator(tokens),
            self,
        )
        if is_open:
            self.open()

    def open(self) -> None:
        """As after every tier's first report."""
        self.model.open(self.source, self.source.signature)
        self.model.example = self.source.examples()
        for name, lane in self.model.lanes.items():
            lane.description = self.tiers[name].description

    async def page(self, openmetrics: bool) -> bytes:
        """The rendered page."""
        self.hub.push("test", take_snapshot(self.metrics.registry))
        return self.hub.render(openmetrics)

    async def families(self) -> list[Family]:
        """The merged families."""
        self.hub.push("test", take_snapshot(self.metrics.registry))
        return self.hub.merged()

    async def processes(self) -> list[str]:
        """This one, and the hub."""
        self.hub.push("test", take_snapshot(self.metrics.registry))
        return self.hub.processes()

    async def process_page(self, process: str, openmetrics: bool) -> bytes | None:
        """Its own figures."""
        self.hub.push("test", take_snapshot(self.metrics.registry))
        return self.hub.render_process(process, openmetrics)

    async def set_tier(self, model: str, tier: str, action: str, reason: str) -> None:
        """Trip or reset a tier by hand."""
        self.set_by_hand.append((model, tier, action, reason))

    async def call(
        self, method: str, path: str, body: bytes = b"", headers: list[tuple[str, str]] | None = None
    ) -> Response:
        """One request."""
        return await self.service.handle(Request(method, path, "", Headers(headers or []), body))

    async def get(self, path: str, *headers: tuple[str, str]) -> tuple[int, Any]:
        """Status and document."""
        response = await self.call("GET", path, headers=list(headers))
        return response.status, json.loads(response.body)

    async def infer(self, *headers: tuple[str, str], rows: int = 1, **fields: Any) -> Response:
        """A JSON inference of that many rows."""
        tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 2], "data": [1.5, -2] * rows}
        body = json.dumps({"inputs": [tensor], **fields}).encode()
        return await self.call("POST", "/v2/models/m/infer", body, list(headers))

    def counted(self, name: str, **labels: str) -> float:
        """A sample's value; 0 when there is none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    def assert_idle(self) -> None:
        """Nothing is queued, under way or forgotten."""
        assert self.service.inflight_requests == 0
        for lane in self.model.lanes.values():
            if lane.coalescer is not None:
                assert (lane.coalescer.queue_rows, lane.coalescer.inflight_rows) == (0, 0)


@pytest.fixture(scope="session")
def make_gateway() -> type[Gateway]:
    """Makes gateways."""
    return Gateway


@pytest.fixture
def gateway() -> Gateway:
    """One with everything ready."""
    return Gateway()
