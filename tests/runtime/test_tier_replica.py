"""A tier's replica without Serve: its periodic check, and what ends it."""

import asyncio
from typing import Any

import pytest

from serving.config import ModelConfig
from serving.errors import DeviceLost, DeviceOutOfMemory, NotReady
from serving.gateway.tier_client import BatchResult
from serving.runtime import tier_replica
from serving.runtime.engine import Engine
from serving.runtime.tier_plan import TierPlan
from serving.runtime.tier_replica import TierReplica

MODEL = {"name": "echo", "source": "serving.models.echo:Echo", "tiers": {"fp32": {}}}


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(tier_replica, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(tier_replica, "EXIT_DELAY_S", 0.0)
    monkeypatch.setattr(tier_replica.os, "_exit", statuses.append)
    return statuses


async def checked_replica() -> TierReplica:
    """A replica whose check has run several times."""
    replica = TierReplica(TierPlan(ModelConfig.model_validate(MODEL), "fp32", threads=1))
    await replica.report()
    await asyncio.sleep(0.3)
    return replica


async def answer(replica: TierReplica) -> Any:
    """What it makes of its own example."""
    return await replica.run((await replica.report()).example)


def test_a_well_replica_goes_on(exits: list[int]) -> None:
    """However often it is checked."""

    async def scenario() -> None:
        assert isinstance(await answer(await checked_replica()), BatchResult)

    asyncio.run(scenario())
    assert exits == []


def test_a_wrong_known_answer_ends_the_process(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And until it has ended, nothing is answered."""
    monkeypatch.setattr(Engine, "broken", lambda _: "the known answer is off")

    async def scenario() -> None:
        assert isinstance(await answer(await checked_replica()), NotReady)

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
        assert isinstance(await answer(await checked_replica()), BatchResult)

    asyncio.run(scenario())
    assert exits == []


def test_altered_arithmetic_leaves_service_but_keeps_the_process(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process would be altered the same way; the reason stays to be read."""
    monkeypatch.setattr(Engine, "altered", lambda _: "a switch was changed")

    async def scenario() -> None:
        replica = await checked_replica()
        assert isinstance(await answer(replica), NotReady)
        assert (await replica.report()).description.failure == "a switch was changed"

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

    asyncio.run(scenario())
    assert exits == [1]
