"""Batches over the channel: the right replica, faults, and the way back to Serve."""

import asyncio
from typing import Any

import numpy as np
import pytest
from channel_ends import Fallback, Replica, batch, new_client, play, until

from serving.channel import connection as connection_module
from serving.channel.endpoint import Endpoint
from serving.errors import DeviceLost, InternalError, ModelError, NotReady, TierLost


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
