"""More connections than the server takes: who is refused, how, and that room is found again."""

import contextlib
import http.client
import json
import socket
import ssl
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from certificates import issue

from serving.protocol.http import Request, Response
from serving.protocol.turned_away import MAX_LINGERING

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
LIMIT = 4


async def hello(_: Request) -> Response:
    """A short answer."""
    return Response(200, [], b"hello")


@pytest.fixture
def full(wire: Any, loop_thread: Any, make_server: Any) -> Any:
    """A server with as many idle connections as it takes: its port, and the connections."""
    server = make_server(hello, max_connections=LIMIT)
    loop_thread.run(server.start())
    with ExitStack() as stack:
        yield server.port, [stack.enter_context(wire.connect(server.port)) for _ in range(LIMIT)]


def ask(port: int) -> tuple[int, Any, float]:
    """Status, body and seconds of a GET on a connection of its own."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/")
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body, time.monotonic() - began_s


def test_one_too_many_is_told_so(full: Any) -> None:
    """503 in the one shape of every error, within a second, with the time to come back."""
    port, connections = full
    status, body, took_s = ask(port)
    assert status == 503
    assert json.loads(body)["code"] == "too_many_connections"
    assert took_s < 2
    # Those that were there first are served.
    connections[0].sendall(GET)
    assert connections[0].recv(1000).endswith(b"hello")


def test_room_is_found_again(full: Any) -> None:
    """As soon as one leaves, also after many were refused."""
    port, connections = full
    assert [ask(port)[0] for _ in range(3)] == [503] * 3
    connections.pop().close()
    assert ask(port)[:2] == (200, b"hello")


def test_a_crowd_is_refused(full: Any, wire: Any) -> None:
    """Beyond those that are waited for, without an answer; and the server is none the worse."""
    port, connections = full
    with ExitStack() as stack:
        crowd = [stack.enter_context(wire.connect(port)) for _ in range(4 * MAX_LINGERING)]
        answers = [ended(connection) for connection in crowd]
    assert sum(b"too_many_connections" in answer for answer in answers) >= MAX_LINGERING
    assert all(answer == b"" or b"too_many_connections" in answer for answer in answers)
    for connection in connections:
        connection.close()
    assert ask(port)[:2] == (200, b"hello")


def ended(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65_536):
            received += chunk
    return received


def test_a_client_that_is_still_sending_reads_the_answer(full: Any, wire: Any) -> None:
    """Its body is taken in, up to a limit, or the answer would be lost with the connection."""
    port, _ = full
    with wire.connect(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 500000\r\n\r\n" + bytes(500_000))
        assert ended(connection).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")


def test_a_short_crowd_waits_and_is_served(wire: Any, loop_thread: Any, make_server: Any) -> None:
    """Connections that come and go faster than anybody looks are nobody's concern."""
    server = make_server(hello, max_connections=2)
    loop_thread.run(server.start())
    assert {wire.get(server.port)[-5:] for _ in range(300)} == {b"hello"}


def test_over_tls_they_are_disconnected(
    loop_thread: Any, make_server: Any, wire: Any, tmp_path: Path
) -> None:
    """Nothing can be said to clients whose handshakes are still to come."""
    pair = issue(tmp_path / "tls", "127.0.0.1")
    server = make_server(hello, max_connections=1, tls_certificate=pair.certificate, tls_key=pair.key)
    loop_thread.run(server.start())
    context = ssl.create_default_context(cafile=pair.ca)
    with context.wrap_socket(wire.connect(server.port), server_hostname="127.0.0.1"):
        began_s = time.monotonic()
        with ExitStack() as stack:
            crowd = [stack.enter_context(wire.connect(server.port, 20)) for _ in range(200)]
            assert {ended(refused) for refused in crowd} == {b""}
        assert time.monotonic() - began_s < 3


@pytest.mark.parametrize("end", ["stop", "leave"])
def test_the_port_is_free_when_the_server_ends(
    wire: Any, loop_thread: Any, make_server: Any, end: str
) -> None:
    """Nothing goes on listening."""
    server = make_server(hello, max_connections=1)
    loop_thread.run(server.start())
    with wire.connect(server.port):
        assert ask(server.port)[0] == 503
        loop_thread.run(getattr(server, end)(1))
    with pytest.raises(ConnectionRefusedError):
        wire.connect(server.port)
