"""Finding this process's own sockets by their port."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.protocol.own_sockets import close_door, connections, inode, listeners


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """It listens; nobody is accepted unless a test does it."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((request.param, 0))
        listening.listen()
        yield listening


def test_listeners_are_found_by_port(listener: socket.socket) -> None:
    """Every handle on them, and none of another port; handles are closed."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    port = listener.getsockname()[1]
    with listener.dup():
        assert [inode(handle) for handle in listeners(port)] == [inode(listener)] * 2
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert list(listeners(other.getsockname()[1])) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_connections_are_those_that_were_accepted(listener: socket.socket) -> None:
    """Not the ends of clients, nor those that wait."""
    address = listener.getsockname()
    with socket.create_connection(address[:2]), socket.create_connection(address[:2]):
        assert connections(address[1]) == 0
        accepted, _ = listener.accept()
        with accepted:
            assert connections(address[1]) == 1
        assert connections(address[1]) == 0


def test_other_files_are_passed_over(listener: socket.socket) -> None:
    """Pipes, and sockets of another kind on the same port."""
    host, port = listener.getsockname()[:2]
    reading, writing = os.pipe()
    with socket.socket(listener.family, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind((host, port))
        assert connections(port) == 0
        assert len(list(listeners(port))) == 1
    os.close(reading)
    os.close(writing)


def test_behind_a_closed_door_are_those_who_came_before(listener: socket.socket) -> None:
    """Accepted or still waiting, they talk on; nobody else gets in, not even into the queue."""
    address = listener.getsockname()[:2]
    with socket.create_connection(address) as early, socket.create_connection(address) as waiting:
        accepted, _ = listener.accept()
        close_door(listener)
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
        taken_up, _ = listener.accept()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        with accepted, taken_up:
            for client, server in ((early, accepted), (waiting, taken_up)):
                client.sendall(b"ask")
                assert server.recv(9) == b"ask"
                server.sendall(b"answer")
                assert client.recv(9) == b"answer"
