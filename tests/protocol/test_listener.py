"""A listener whose door is closed before it is."""

import select
import socket
from collections.abc import Iterator

import pytest

from serving.protocol.listener import close_door, listen


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """It listens; nobody is accepted unless a test does it."""
    with listen(request.param, 0, 1000) as listening:
        yield listening


def test_others_listen_on_the_same_port(listener: socket.socket) -> None:
    """Those that open theirs in the same way, and no others."""
    host, port = listener.getsockname()[:2]
    with listen(host, port, 1000) as other:
        assert other.getsockname()[1] == port
    with socket.socket(listener.family) as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((host, port))


def accept(listener: socket.socket) -> socket.socket:
    """The next connection, which has been made."""
    assert select.select([listener], [], [], 5)[0]
    connection, _ = listener.accept()
    connection.settimeout(5)
    return connection


def test_behind_a_closed_door_are_those_who_came_before(listener: socket.socket) -> None:
    """Accepted or still waiting, they talk on; nobody else gets in, not even into the queue."""
    address = listener.getsockname()[:2]
    with socket.create_connection(address) as early, socket.create_connection(address) as waiting:
        accepted = accept(listener)
        close_door(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
        taken_up = accept(listener)
        with pytest.raises(BlockingIOError):
            listener.accept()
        with accepted, taken_up:
            for client, server in ((early, accepted), (waiting, taken_up)):
                client.sendall(b"ask")
                assert server.recv(9) == b"ask"
                server.sendall(b"answer")
                assert client.recv(9) == b"answer"
