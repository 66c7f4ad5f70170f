"""A tier's replica without Serve: its periodic check, and what ends it."""

import asyncio
import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from serving.channel.client import ChannelTierClient
from serving.config import ModelConfig
from serving.errors import Deadline, DeviceLost, DeviceOutOfMemory, NotReady
from serving.gateway.tier_client import BatchResult, TierReport
from serving.runtime import tier_replica
from serving.runtime.engine import Engine
from serving.runtime.replica_ledger import Announcement
from serving.runtime.tier_plan import TierPlan
from serving.runtime.tier_replica import ChannelPlan, TierReplica
from serving.tensors import Tensors

MODEL = {"name": "echo", "source": "serving.models.echo:Echo", "tiers": {"fp32": {}}}
# Serve awaits it when a replica stops; here nothing would, whenever one is collected.
del TierReplica.__del__

KEY = b"the key of this run"


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(tier_replica, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(tier_replica, "EXIT_DELAY_S", 0.0)
    monkeypatch.setattr(tier_replica.os, "_exit", statuses.append)
    monkeypatch.setattr(tier_replica, "_tcp_host", lambda: None)
    monkeypatch.setattr(tier_replica, "ANNOUNCE_INTERVAL_S", 0.01)
    HUB.announced.clear()
    return statuses


class FakeHub:
    """Takes announcements."""

    def __init__(self) -> None:
        self.announced: list[Announcement] = []

    def options(self, **_: Any) -> "FakeHub":
        """The handle of one method."""
        return self

    async def remote(self, said: Announcement) -> None:
        """Called."""
        self.announced.append(said)


class FakeFallback:
    """The Serve handle, which nothing needs here."""

    async def run(self, batch: Tensors, **_: Any) -> BatchResult:
        """Never called."""
        raise NotImplementedError

    async def report(self, *, with_example: bool) -> TierReport:
        """Never called."""
        raise NotImplementedError


HUB = FakeHub()


async def checked_replica(batch_limit_s: float = math.inf) -> TierReplica:
    """A replica whose check has run several times."""
    plan = TierPlan(ModelConfig.model_validate(MODEL), "fp32", threads=1)
    replica = TierReplica.__new__(TierReplica)
    channel = ChannelPlan(KEY, max_inflight=4, batch_limit_s=batch_limit_s)
    await replica.__init__(plan, channel, HUB)  # type: ignore[misc]  # As Serve does.
    await asyncio.sleep(0.3)
    return replica


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not condition():  # noqa: ASYNC110  Conditions of foreign objects.
        await asyncio.sleep(0.005)


async def answer(replica: TierReplica) -> Any:
    """What it makes of a row."""
    return await replica.run({"x": np.ones((1, 128), np.float32)})


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
        endpoint = HUB.announced[-1].endpoint
        assert endpoint is not None
        client = ChannelTierClient("echo/fp32", FakeFallback(), KEY, timeout_s=5.0)
        client.update([endpoint])
        async with asyncio.timeout(5):
            await until(lambda: client.connected == 1)
            example = (await replica.report(with_example=True)).example
            np.testing.assert_array_equal((await client.run(example)).outputs["y"], example["x"])
            await replica.close()
            await until(lambda: client.connected == 0)

    asyncio.run(scenario())
    assert exits == []


def test_it_says_how_it_is_and_what_it_holds(exits: list[int]) -> None:
    """Loading first, then serving with its memory; at the end a goodbye."""

    async def scenario() -> None:
        replica = await checked_replica()
        await until(lambda: bool(HUB.announced[-1].memory_bytes))
        await replica.close()

    asyncio.run(scenario())
    said = HUB.announced
    changes = [
        (one.state, other.state) for one, other in itertools.pairwise(said) if one.state != other.state
    ]
    assert changes == [("loading", "serving")]
    assert said[0].endpoint is None
    assert {one.replica for one in said} == {said[0].replica}
    served = [one for one in said if one.state == "serving" and not one.is_goodbye]
    assert served[-1].memory_bytes["rss"] > 2**20
    assert served[-1].endpoint is not None
    assert [one.is_goodbye for one in said].index(True) == len(said) - 1


def test_one_that_cannot_load_says_so(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It lives, without an address."""

    def broken(*_: Any) -> Engine:
        raise ValueError("no such weights")

    monkeypatch.setattr(Engine, "load", broken)

    async def scenario() -> None:
        replica = await checked_replica()
        assert (await replica.report(with_example=False)).description.failure == "ValueError: no such weights"
        await replica.close()

    asyncio.run(scenario())
    assert {(one.state, one.endpoint) for one in HUB.announced[-2:]} == {("failed", None)}


def test_a_wrong_known_answer_ends_the_process(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has ended nothing is answered: another can, and what this one is says nothing of the tier."""
    monkeypatch.setattr(Engine, "broken", lambda _: "the known answer is off")

    async def scenario() -> None:
        replica = await checked_replica()
        assert isinstance(await answer(replica), DeviceLost)
        with pytest.raises(DeviceLost, match="the known answer is off"):
            await replica.report(with_example=False)
        assert HUB.announced[-1].endpoint is None
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
        assert (await replica.report(with_example=False)).description.failure == "a switch was changed"
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


def test_a_batch_that_waited_too_long_is_not_computed(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found when the device thread takes it up; others are computed."""
    computed: list[Tensors] = []
    run = Engine.run

    def counted(engine: Engine, batch: Tensors) -> BatchResult:
        computed.append(batch)
        return run(engine, batch)

    monkeypatch.setattr(Engine, "run", counted)
    monkeypatch.setattr(tier_replica, "CHECK_INTERVAL_S", 60.0)

    async def scenario() -> None:
        replica = await checked_replica()
        example = (await replica.report(with_example=True)).example
        computed.clear()
        late, in_time = await asyncio.gather(replica.run(example, 0.0), replica.run(example, 60.0))
        assert isinstance(late, Deadline)
        assert isinstance(in_time, BatchResult)
        assert len(computed) == 1
        await replica.close()

    asyncio.run(scenario())
    assert exits == []


def test_a_hung_device_thread_ends_the_process(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways see its sockets close; a replica that works for long, batch by batch, goes on."""
    monkeypatch.setattr(tier_replica, "HANG_POLL_S", 0.01)
    monkeypatch.setattr(tier_replica, "CHECK_INTERVAL_S", 60.0)
    hangs = threading.Event()
    released = threading.Event()

    def slow(engine: Engine, batch: Tensors) -> BatchResult:
        released.wait(60.0 if hangs.is_set() else 0.05)
        return BatchResult(batch, 0.05)

    async def scenario() -> None:
        replica = await checked_replica(batch_limit_s=0.5)
        monkeypatch.setattr(Engine, "run", slow)
        for _ in range(15):
            assert isinstance(await answer(replica), BatchResult)
        assert exits == []
        hangs.set()
        stuck = asyncio.create_task(answer(replica))
        async with asyncio.timeout(10):
            await until(lambda: exits == [1])
        released.set()
        await stuck
        assert isinstance(await answer(replica), DeviceLost)
        await replica.close()

    asyncio.run(scenario())


STUCK = """
import asyncio, time
from serving.runtime import tier_replica
from serving.runtime.tier_replica import TierReplica

tier_replica.HANG_POLL_S = 0.05

async def scenario():
    replica = object.__new__(TierReplica)
    replica._began_s = None
    watch = asyncio.create_task(replica._end_when_hung(0.2))
    await asyncio.sleep(0.5)
    print("well", flush=True)
    time.sleep(60)  # As code that never lets go of the interpreter's lock: nothing else runs.

del TierReplica.__del__
asyncio.run(scenario())
"""


def test_a_process_in_which_nothing_runs_any_more_ends_itself() -> None:
    """And its log says where every thread was."""
    ended = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, check=False, timeout=50
    )
    assert ended.returncode == 1
    assert ended.stdout == "well\n"
    assert "Timeout" in ended.stderr
    assert "in scenario" in ended.stderr
