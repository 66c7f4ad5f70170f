"""A tier's replica without Serve: its periodic check, and what ends it."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from serving.channel.client import ChannelTierClient
from serving.channel.endpoint import Endpoint
from serving.config import ModelConfig
from serving.errors import DeviceLost, DeviceOutOfMemory, NotReady
from serving.gateway.tier_client import BatchResult, TierReport
from serving.runtime import tier_replica
from serving.runtime.engine import Engine
from serving.runtime.tier_plan import TierPlan
from serving.runtime.tier_replica import ChannelPlan, TierReplica
from serving.tensors import Tensors

MODEL = {"name": "echo", "source": "serving.models.echo:Echo", "tiers": {"fp32": {}}}
KEY = b"the key of this run"


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses with which the process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(tier_replica, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(tier_replica, "EXIT_DELAY_S", 0.0)
    monkeypatch.setattr(tier_replica.os, "_exit", statuses.append)
    monkeypatch.delattr(TierReplica, "__del__")  # Awaited by Serve only.
    monkeypatch.setattr(tier_replica, "_tcp_host", lambda: None)
    monkeypatch.setattr(tier_replica, "ANNOUNCE_INTERVAL_S", 0.01)
    HUB.announced.clear()
    yield statuses
    gc.collect()  # While nothing awaits `__del__`.


class FakeHub:
    """Takes announcements."""

    def __init__(self) -> None:
        self.announced: list[Endpoint] = []

    def options(self, **_: Any) -> "FakeHub":
        """The handle of one method."""
        return self

    async def remote(self, endpoint: Endpoint) -> None:
        """Called."""
        self.announced.append(endpoint)


class FakeFallback:
    """The Serve handle, which nothing needs here."""

    async def run(self, batch: Tensors, attempts: int = 2) -> BatchResult:
        """Never called."""
        raise NotImplementedError

    async def report(self) -> TierReport:
        """Never called."""
        raise NotImplementedError


HUB = FakeHub()


async def checked_replica() -> TierReplica:
    """A replica whose check has run several times."""
    plan = TierPlan(ModelConfig.model_validate(MODEL), "fp32", threads=1)
    replica = TierReplica(plan, ChannelPlan(KEY, max_inflight=4), HUB)  # type: ignore[arg-type]
    await replica.report()
    await asyncio.sleep(0.3)
    return replica


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():  # noqa: ASYNC110  Conditions of foreign objects.
        await asyncio.sleep(0.005)


async def answer(replica: TierReplica) -> Any:
    """What it makes of its own example."""
    return await replica.run((await replica.report()).example)


def test_a_well_replica_goes_on(exits: list[int]) -> None:
    """However often it is checked."""

    async def scenario() -> None:
        replica = await checked_replica()
        assert isinstance(await answer(replica), BatchResult)
        await replica.close()

    asyncio.run(scenario())
    assert exits == []


def test_gateways_reach_it_directly_until_it_stops(exits: list[int]) -> None:
    """At the address that it announces, again and again."""

    async def scenario() -> None:
        replica = await checked_replica()
        assert len(HUB.announced) > 1
        client = ChannelTierClient("echo/fp32", FakeFallback(), KEY, timeout_s=5.0)
        client.update(HUB.announced[-1:])
        async with asyncio.timeout(5):
            await until(lambda: client.connected == 1)
            example = (await replica.report()).example
            np.testing.assert_array_equal((await client.run(example)).outputs["y"], example["x"])
            await replica.close()
            await until(lambda: client.connected == 0)

    asyncio.run(scenario())
    assert exits == []


def test_a_wrong_known_answer_ends_the_process(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And until it has ended, nothing is answered."""
    monkeypatch.setattr(Engine, "broken", lambda _: "the known answer is off")

    async def scenario() -> None:
        replica = await checked_replica()
        assert isinstance(await answer(replica), NotReady)
        await replica.close()

    asyncio.run(scenario())
    assert exits == [1]


def test_no_memory_for_the_known_answer_ends_nothing(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It proves nothing against the device."""

    def no_room(_: Engine) -> str | None:
        raise DeviceOutOfMemory("no room")

    monkeypatch.setattr(Engine, "broken", no_room)

    async def scenario() -> None:
        replica = await checked_replica()
        assert isinstance(await answer(replica), BatchResult)
        await replica.close()

    asyncio.run(scenario())
    assert exits == []


def test_altered_arithmetic_leaves_service_but_keeps_the_process(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process would be altered the same way; the reason stays to be read."""

    async def scenario() -> None:
        replica = await checked_replica()
        monkeypatch.setattr(Engine, "altered", lambda _: "a switch was changed")
        await asyncio.sleep(0.3)
        assert isinstance(await answer(replica), NotReady)
        assert (await replica.report()).description.failure == "a switch was changed"
        await replica.close()

    asyncio.run(scenario())
    assert exits == []


def test_a_lost_device_is_told_and_ends_the_process(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway sends the batch elsewhere."""

    def lost(*_: Any) -> BatchResult:
        raise DeviceLost("it failed")

    monkeypatch.setattr(tier_replica, "CHECK_INTERVAL_S", 60.0)  # The request finds it, not the check.

    async def scenario() -> None:
        replica = await checked_replica()
        monkeypatch.setattr(Engine, "run", lost)
        assert isinstance(await answer(replica), DeviceLost)
        await asyncio.sleep(0.05)
        await replica.close()

    asyncio.run(scenario())
    assert exits == [1]
