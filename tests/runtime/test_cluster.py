"""Holding a port: against strangers, against a second run, and no longer than needed."""

import os
import socket
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import ray

from serving.config import ServerConfig, parse_config
from serving.errors import HalftoneError
from serving.runtime.cluster import PortTaken, local_cluster, reserved_port


def bound(*options: int) -> socket.socket:
    """A socket on a free loopback port."""
    found = socket.socket()
    for option in options:
        found.setsockopt(socket.SOL_SOCKET, option, 1)
    found.bind(("127.0.0.1", 0))
    return found


@pytest.fixture
def server() -> Iterator[ServerConfig]:
    """A configuration with a port that was free a moment ago."""
    with bound() as probe:
        port = probe.getsockname()[1]
    return ServerConfig(port=port)


def test_a_free_port_is_held_and_released(server: ServerConfig) -> None:
    """Twice in a row."""
    for _ in range(2):
        with reserved_port(server):
            pass


def test_a_second_run_is_refused_while_the_first_holds(server: ServerConfig) -> None:
    """Both would bind with SO_REUSEPORT and take connections in turn."""
    with (
        reserved_port(server),
        pytest.raises(PortTaken, match=f"127.0.0.1:{server.port}: Address already in use"),
        reserved_port(server),
    ):
        pass
    with reserved_port(server):
        pass


def test_gateways_bind_and_listen_while_it_is_held(server: ServerConfig) -> None:
    """Several of them; the holder takes none of their connections."""
    address = (server.host, server.port)
    with reserved_port(server), socket.socket() as one, socket.socket() as other:
        for gateway in (one, other):
            gateway.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            gateway.bind(address)
        one.listen()
        for _ in range(5):
            with socket.create_connection(address, timeout=5) as client:
                accepted, _ = one.accept()
                with accepted:
                    assert accepted.getpeername() == client.getsockname()


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,)])
def test_a_port_where_something_listens_is_refused(options: tuple[int, ...]) -> None:
    """Also where that shares it with whoever asks."""
    with bound(*options) as stranger:
        stranger.listen()
        server = ServerConfig(port=stranger.getsockname()[1])
        with pytest.raises(PortTaken, match="Address already in use"), reserved_port(server):
            pass


def test_it_is_released_when_the_run_fails(server: ServerConfig) -> None:
    """By whatever exception."""
    with pytest.raises(ZeroDivisionError), reserved_port(server):
        raise ZeroDivisionError
    with reserved_port(server):
        pass


def test_a_connection_that_lingers_does_not_block_a_restart(server: ServerConfig) -> None:
    """After a stop the system keeps the last connections for a minute."""
    address = (server.host, server.port)
    with socket.socket() as gateway:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # As the HTTP server does.
            gateway.setsockopt(socket.SOL_SOCKET, option, 1)
        gateway.bind(address)
        gateway.listen()
        client = socket.create_connection(address, timeout=5)
        accepted, _ = gateway.accept()
        accepted.close()  # This side closes first, and so waits.
        client.close()
    with reserved_port(server):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a..b", "x\0y"])
def test_an_address_that_is_not_this_machines_is_refused(host: str) -> None:
    """By its name, as a sentence."""
    server = ServerConfig(host=host, port=9, allow_unauthenticated=True)
    with pytest.raises(PortTaken, match="cannot listen on"), reserved_port(server):
        pass


def test_a_ray_that_does_not_start_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine too busy for its node to come up in time, Ray raises a bare `Exception`."""

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup. And more.\nAnd yet more.")  # noqa: TRY002  Ray's.

    config = parse_config("models: [{name: echo, source: 'serving.models.echo:Echo', tiers: {fp32: {}}}]")
    with patch.dict(os.environ):
        monkeypatch.setattr(ray, "init", init)
        with (
            pytest.raises(HalftoneError, match=r"^Ray could not be started: The current node .*more\.$"),
            local_cluster(config),
        ):
            pass
