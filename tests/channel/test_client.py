"""Batches over the channel: the right replica, faults, and the way back to Serve."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from channel_ends import Fallback, Replica, batch, new_client, play, until

from serving.channel import connection as connection_module
from serving.channel.endpoint import Endpoint
from serving.errors import DeviceLost, InternalError, ModelError, NotReady, TierLost
from serving.gateway.tier_client import lost_with_replicas


def number(result: Any) -> float:
    """Which replica computed it; -1: the fallback."""
    return float(result.outputs["y"][0, 0])


def test_a_batch_is_computed_by_the_replica(client_of: Any) -> None:
    """And the reply carries its time."""

    async def scenario() -> None:
        client = await client_of(Replica(1))
        result = await client.run(batch())
        np.testing.assert_array_equal(result.outputs["y"], np.ones((2, 3), np.float32))
        assert result.compute_s == 0.25

    play(scenario)


def test_batches_overlap_and_each_gets_its_own_reply(client_of: Any) -> None:
    """Whatever the order in which they are finished."""

    async def scenario() -> None:
        client = await client_of(Replica(1))
        sent = [{"x": np.full((1, 1), value, np.float32)} for value in range(4)]
        results = await asyncio.gather(*[client.run(one) for one in sent])
        assert [number(result) for result in results] == [1, 2, 3, 4]

    play(scenario)


def test_the_least_loaded_replica_is_taken(client_of: Any) -> None:
    """By rows outstanding, not by turns."""

    async def scenario() -> None:
        busy, idle = Replica(1), Replica(2)
        client = await client_of(busy, idle)
        busy.gate.clear()
        held = asyncio.create_task(client.run(batch(rows=30)))
        await until(lambda: busy.started == 1)
        assert [number(await client.run(batch())) for _ in range(3)] == [2, 2, 2]
        busy.gate.set()
        assert number(await held) == 1

    play(scenario)


def test_a_background_batch_goes_to_idle_replicas_in_turn(client_of: Any) -> None:
    """So that the same rows come from several of them."""

    async def scenario() -> None:
        client = await client_of(Replica(1), Replica(2), Replica(3))
        found = [number(await client.run_background(batch())) for _ in range(6)]
        assert sorted(found[:3]) == sorted(found[3:]) == [1, 2, 3]

    play(scenario)


def test_a_background_batch_waits_for_nobody(client_of: Any, fallback: Fallback) -> None:
    """With every replica at work, or none connected, it is refused at once."""

    async def scenario() -> None:
        busy, idle = Replica(1), Replica(2)
        client = await client_of(busy, idle)
        busy.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        await until(lambda: busy.started + idle.started == 1)
        if idle.started:  # The other one took it.
            busy, idle = idle, busy
        assert [number(await client.run_background(batch())) for _ in range(3)] == [idle.number] * 3
        busy.gate.set()
        await held
        with pytest.raises(NotReady, match="no connected replica is idle"):
            await new_client(fallback).run_background(batch())

    play(scenario)
    assert fallback.attempts == []


def test_a_replica_with_another_gateway_s_batch_takes_none_in_the_background(
    client_of: Any, fallback: Fallback
) -> None:
    """A gateway sees its own batches only; the replica knows better."""

    async def scenario() -> None:
        replica = Replica(1)
        client = await client_of(replica)
        other = new_client(fallback)
        assert replica.endpoint is not None
        other.update([replica.endpoint])
        await until(lambda: other.connected == 1)
        replica.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        await until(lambda: replica.started == 1)
        with pytest.raises(NotReady, match="no time to spare"):
            await other.run_background(batch())
        replica.gate.set()
        await held

    play(scenario)


def test_a_replica_that_dies_in_a_background_batch_takes_no_other_with_it(
    client_of: Any, fallback: Fallback
) -> None:
    """The batch counts as refused, and is not tried elsewhere at once: it may be what kills."""

    async def scenario() -> None:
        dying, living = Replica(1), Replica(2)
        client = await client_of(dying, living)
        dying.gate.clear()
        living.gate.clear()
        held = asyncio.create_task(client.run_background(batch()))
        await until(lambda: dying.started + living.started == 1)
        if living.started:
            dying, living = living, dying
        dying.die()
        with pytest.raises(NotReady, match="the replica was lost"):
            await held
        living.gate.set()
        assert number(await client.run_background(batch())) == living.number

    play(scenario)
    assert fallback.attempts == []


def test_idle_replicas_take_turns(client_of: Any) -> None:
    """A lone caller's batches do not all go to one of them."""

    async def scenario() -> None:
        client = await client_of(Replica(1), Replica(2), Replica(3))
        found = [number(await client.run(batch())) for _ in range(6)]
        assert sorted(found) == [1, 1, 2, 2, 3, 3]
        assert len(set(found[:3])) == 3

    play(scenario)


def test_without_a_replica_the_serve_handle_takes_it(fallback: Fallback) -> None:
    """It waits for one to start."""

    async def scenario() -> None:
        client = new_client(fallback)
        assert number(await client.run(batch())) == -1

    play(scenario)
    assert fallback.attempts == [2]


def test_a_batch_whose_replica_dies_is_computed_elsewhere(client_of: Any, fallback: Fallback) -> None:
    """In flight or not, none is lost while another replica lives."""

    async def scenario() -> None:
        dying, living = Replica(1), Replica(2)
        client = await client_of(dying, living)
        dying.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        await until(lambda: dying.started == 1)
        dying.die()
        assert number(await held) == 2
        assert client.connected == 1

    play(scenario)
    assert fallback.attempts == []


def test_with_the_only_replica_dead_the_serve_handle_has_one_attempt_left(
    client_of: Any, fallback: Fallback
) -> None:
    """A batch that kills replicas kills two, not three."""

    async def scenario() -> None:
        only = Replica(1)
        client = await client_of(only)
        only.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        await until(lambda: only.started == 1)
        only.die()
        assert number(await held) == -1

    play(scenario)
    assert fallback.attempts == [1]


def test_a_batch_that_loses_two_replicas_is_given_up(client_of: Any, fallback: Fallback) -> None:
    """It may be what kills them."""

    async def scenario() -> None:
        replicas = [Replica(1), Replica(2), Replica(3)]
        client = await client_of(*replicas)
        for replica in replicas:
            replica.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        for _ in range(2):
            await until(lambda: any(replica.started for replica in replicas))
            victim = next(replica for replica in replicas if replica.started)
            victim.started = 0
            victim.die()
        with pytest.raises(TierLost, match="lost its replica twice"):
            await held

    play(scenario)
    assert fallback.attempts == []


def test_a_lost_device_is_not_asked_again(client_of: Any) -> None:
    """Its process ends in a moment; the batch goes elsewhere."""

    async def scenario() -> None:
        lost, well = Replica(1), Replica(2)
        lost.error = DeviceLost("it failed")
        client = await client_of(lost, well)
        assert [number(await client.run(batch())) for _ in range(3)] == [2, 2, 2]
        assert lost.started <= 1

    play(scenario)


@pytest.mark.parametrize("error", [ModelError("it raised"), NotReady("altered")])
def test_a_requests_own_error_is_not_retried(client_of: Any, error: Any) -> None:
    """It would only be the same again."""

    async def scenario() -> None:
        replica = Replica(1)
        replica.error = error
        client = await client_of(replica)
        with pytest.raises(type(error), match=str(error)):
            await client.run(batch())
        assert replica.started == 1

    play(scenario)


def test_a_fault_of_the_replicas_own_is_internal(client_of: Any) -> None:
    """Its words stay in its log."""

    async def scenario() -> None:
        replica = Replica(1)
        replica.error = RuntimeError("secret")
        client = await client_of(replica)
        with pytest.raises(InternalError) as caught:
            await client.run(batch())
        assert "secret" not in str(caught.value)

    play(scenario)


def test_a_replica_that_does_not_answer_is_waited_for_no_longer_than_agreed(client_of: Any) -> None:
    """All attempts together; and its rows are forgotten."""

    async def scenario() -> None:
        replica = Replica(1)
        client = await client_of(replica, timeout_s=0.1)
        replica.gate.clear()
        with pytest.raises(TierLost, match=r"within 0\.1 s"):
            await client.run(batch())
        [connection] = client._connections.values()
        assert connection.outstanding_rows == 0
        replica.gate.set()
        assert number(await client.run(batch())) == 1  # The late reply confuses nobody.

    play(scenario)


def test_more_batches_than_agreed_are_refused(client_of: Any) -> None:
    """The replica's memory is bounded whatever gateways do."""

    async def scenario() -> None:
        replica = Replica(1, max_inflight=2)
        client = await client_of(replica)
        replica.gate.clear()
        held = [asyncio.create_task(client.run(batch())) for _ in range(2)]
        await until(lambda: replica.started == 2)
        with pytest.raises(NotReady, match="too many"):
            await client.run(batch())
        replica.gate.set()
        assert [number(await one) for one in held] == [1, 1]

    play(scenario)


def test_a_replica_that_stops_finishes_what_it_has(client_of: Any, fallback: Fallback) -> None:
    """And gets nothing new from the moment it says goodbye."""

    async def scenario() -> None:
        leaving, staying = Replica(1), Replica(2)
        client = await client_of(leaving, staying)
        leaving.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        await until(lambda: leaving.started == 1)
        closing = asyncio.create_task(leaving.server.close(timeout_s=5.0))
        await until(lambda: client.connected == 1)
        assert [number(await client.run(batch(1))) for _ in range(3)] == [2, 2, 2]
        leaving.gate.set()
        assert number(await held) == 1
        await closing
        await until(lambda: len(client._connections) == 1)

    play(scenario)
    assert fallback.attempts == []


def test_batches_of_a_gateway_that_went_away_are_dropped(client_of: Any) -> None:
    """Nobody waits for them."""

    async def scenario() -> None:
        replica = Replica(1)
        client = await client_of(replica)
        replica.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        await until(lambda: replica.started == 1)
        client.close()
        await until(lambda: not replica.server._batches)
        assert replica.finished == 0
        await held

    play(scenario)


def test_a_silent_replica_is_given_up(client_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, say: its socket stands, but no ping comes back."""
    monkeypatch.setattr(connection_module, "PING_INTERVAL_S", 0.02)
    monkeypatch.setattr(connection_module, "SILENCE_LIMIT_S", 0.2)

    async def scenario() -> None:
        silent, well = Replica(1), Replica(2)
        client = await client_of(silent, well)
        await asyncio.sleep(0.4)
        assert client.connected == 2  # Pings keep idle connections.
        silent.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        await until(lambda: silent.started == 1)
        for connection in silent.server._connections:
            connection._transport.pause_reading()
        assert number(await held) == 2

    play(scenario)


def test_a_stranger_and_a_wrong_key_get_nowhere(fallback: Fallback) -> None:
    """The gateway keeps to the Serve handle, and says so once."""

    async def scenario() -> None:
        replica = Replica(1)
        endpoint = await replica.listen()
        client = new_client(fallback, b"another key")
        for _ in range(2):
            client.update([endpoint])
            await until(lambda: not client._connecting)
        assert number(await client.run(batch())) == -1
        assert client.connected == replica.started == 0

    play(scenario)


def test_a_replica_that_cannot_be_reached_is_tried_again(fallback: Fallback) -> None:
    """Each time it is announced."""

    async def scenario() -> None:
        replica = Replica(1)
        endpoint = await replica.listen()
        client = new_client(fallback)
        gone = Endpoint("m:fp32", "replica1", endpoint.host, "halftone-nobody")
        client.update([gone])
        await until(lambda: not client._connecting)
        client.update([endpoint])
        await until(lambda: client.connected == 1)

    play(scenario)


def test_gateways_of_other_hosts_use_tcp(fallback: Fallback) -> None:
    """With the same handshake."""

    async def scenario() -> None:
        replica = Replica(3)
        endpoint = await replica.listen(tcp_host="127.0.0.1")
        client = new_client(fallback)
        client._host = "elsewhere"
        client.update([endpoint])
        await until(lambda: client.connected == 1)
        large = {"x": np.zeros((64, 100_000), np.float32)}  # 25 MB each way
        assert number(await client.run(large)) == 3

    play(scenario)


def test_a_replica_on_another_host_without_tcp_is_left_to_serve(fallback: Fallback) -> None:
    """There is no way to it but Serve's."""

    async def scenario() -> None:
        client = new_client(fallback)
        client.update([Endpoint("m:fp32", "r", "elsewhere", "name")])
        assert not client._connecting
        assert number(await client.run(batch())) == -1

    play(scenario)


def test_a_batch_says_how_long_somebody_waits(client_of: Any) -> None:
    """As the time that is left when it is sent; a batch without an end says none."""

    async def scenario() -> None:
        replica = Replica(1)
        client = await client_of(replica)
        now_s = asyncio.get_running_loop().time()
        for deadline_s in (now_s + 100, math.inf, now_s - 1):
            await client.run(batch(), deadline_s=deadline_s)
        left_s, unlimited_s, none_left_s = replica.timeouts_s
        assert 95 < left_s <= 100
        assert unlimited_s == math.inf
        assert 0 < none_left_s < 0.001

    play(scenario)


def test_a_batch_that_nobody_waits_for_is_called_off(client_of: Any) -> None:
    """The replica is told, and goes on with the others."""

    async def scenario() -> None:
        replica = Replica(1)
        client = await client_of(replica)
        replica.gate.clear()
        forsaken, wanted = [asyncio.create_task(client.run(batch())) for _ in range(2)]
        await until(lambda: replica.started == 2)
        forsaken.cancel()
        await until(lambda: len(replica.server._batches) == 1)
        replica.gate.set()
        assert number(await wanted) == 1
        assert replica.finished == 1
        assert client.connected == 1

    play(scenario)


def test_replicas_that_ended_with_the_batch_are_counted(client_of: Any, fallback: Fallback) -> None:
    """Not those that a Serve call found gone."""

    async def scenario() -> None:
        only = Replica(1)
        client = await client_of(only)
        fallback.error = lost_with_replicas("m/fp32", 1, 0)
        only.gate.clear()
        held = asyncio.create_task(client.run(batch()))
        await until(lambda: only.started == 1)
        only.die()
        with pytest.raises(TierLost) as first:
            await held
        assert first.value.replicas_lost == 1
        assert first.value.calls_lost == 2
        fallback.error = lost_with_replicas("m/fp32", 1, 0)
        with pytest.raises(TierLost) as second:
            await client.run(batch())
        assert second.value.replicas_lost == 0
        assert second.value.calls_lost == 1

    play(scenario)


def test_a_suspect_goes_to_one_replica_directly_or_nowhere(client_of: Any, fallback: Fallback) -> None:
    """A Serve call would not tell whether the replica ended with it."""

    async def scenario() -> None:
        first, second = Replica(1), Replica(2)
        client = await client_of(first, second)
        for replica in (first, second):
            replica.gate.clear()
        held = asyncio.create_task(client.run(batch(), is_suspect=True))
        await until(lambda: first.started + second.started == 1)
        for replica in (first, second):
            replica.die()
        with pytest.raises(TierLost, match="lost its replica once") as found:
            await held
        assert found.value.replicas_lost == 1
        await until(lambda: client.connected == 0)
        with pytest.raises(TierLost, match="no replica") as found:
            await client.run(batch(), is_suspect=True)
        assert found.value.replicas_lost == found.value.calls_lost == 0

    play(scenario)
    assert fallback.attempts == []
