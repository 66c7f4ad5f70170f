"""The replica's end against peers that do not behave."""

import asyncio
from typing import Any

import pytest
from channel_ends import KEY, Replica, batch, play, until

from serving.channel import server as server_module
from serving.channel import stream as stream_module
from serving.channel.endpoint import Endpoint, connected_ipc_socket
from serving.channel.handshake import GREETING_BYTES, PROOF_BYTES, answer, new_nonce


async def knock(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A plain connection to a replica."""
    return await asyncio.open_unix_connection(sock=connected_ipc_socket("\0" + endpoint.ipc_name))


async def ends(reader: asyncio.StreamReader) -> bool:
    """Whether the replica closes the connection."""
    async with asyncio.timeout(5):
        try:
            while await reader.read(1000):
                pass
        except ConnectionResetError:
            pass
    return True


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n".ljust(200), bytes(64), b"\xff" * 64])
def test_strangers_are_shut_out(sent: bytes) -> None:
    """Nothing that they send is taken for a frame."""

    async def scenario() -> None:
        replica = Replica(1)
        reader, writer = await knock(await replica.listen())
        writer.write(sent)
        assert await ends(reader)
        writer.close()
        assert replica.started == 0
        await until(lambda: not replica.server._connections)

    play(scenario)


def test_who_says_nothing_is_shut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time."""
    monkeypatch.setattr(stream_module, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        reader, writer = await knock(await Replica(1).listen())
        assert await ends(reader)
        writer.close()

    play(scenario)


def test_garbage_after_the_handshake_closes_the_connection(client_of: Any) -> None:
    """That one only."""

    async def scenario() -> None:
        replica = Replica(1)
        client = await client_of(replica)
        reader, writer = await knock(replica.endpoint)  # type: ignore[arg-type]
        greeted = await reader.readexactly(GREETING_BYTES)
        writer.write(answer(KEY, greeted, new_nonce()))
        await reader.readexactly(PROOF_BYTES)
        writer.write(b"\xff" * 12)
        assert await ends(reader)
        writer.close()
        assert (await client.run(batch())).outputs["y"][0, 0] == 1

    play(scenario)


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is closed before the handshake."""
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)

    async def scenario() -> None:
        endpoint = await Replica(1).listen()
        first = await knock(endpoint)
        assert await first[0].readexactly(GREETING_BYTES)
        second = await knock(endpoint)
        assert await ends(second[0])
        for _, writer in (first, second):
            writer.close()

    play(scenario)
