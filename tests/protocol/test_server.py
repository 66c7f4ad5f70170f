"""The embedded server: start, stop, shared ports, and what it answers on its own."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from certificates import Pair, issue

from serving.protocol.http import Request, Response
from serving.protocol.server import ServerError

GET = b"GET / HTTP/1.1\r\nHost: h\r\n"


async def hello(_: Request) -> Response:
    """A short answer."""
    return Response(200, [], b"hello")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_listens_when_start_returns(wire: Any, loop_thread: Any, make_server: Any, host: str) -> None:
    """The first request is served, by name as by address; after `stop` there is nobody."""
    server = make_server(hello, host=host)
    loop_thread.run(server.start())
    assert wire.get(server.port).endswith(b"hello")
    assert loop_thread.run(server.stop(5))
    with pytest.raises(ConnectionRefusedError):
        wire.connect(server.port)


def test_starting_and_stopping_twice(loop_thread: Any, make_server: Any) -> None:
    """Stopping what does not run is nothing; starting what runs is a mistake."""
    server = make_server(hello)
    assert loop_thread.run(server.stop(1))
    loop_thread.run(server.start())
    with pytest.raises(ServerError, match="already"):
        loop_thread.run(server.start())
    assert loop_thread.run(server.stop(1))
    assert loop_thread.run(server.stop(1))


def test_addresses_that_cannot_be_bound(loop_thread: Any, make_server: Any) -> None:
    """One clear sentence."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = {
            ("127.0.0.1", taken.getsockname()[1]): "in use",
            ("192.0.2.1", 0): "assign",
            ("192.0.2.1", 8000): "assign",
            ("no-such-host.invalid", 8000): "resolve",
        }
        for (host, port), words in cases.items():
            with pytest.raises(ServerError, match=words) as caught:
                loop_thread.run(make_server(hello, host=host, port=port).start())
            assert "\n" not in str(caught.value)


def test_tls_is_not_half_configured(make_server: Any, tmp_path: Path) -> None:
    """A certificate without its key must not become plain HTTP."""
    with pytest.raises(ServerError):
        make_server(hello, tls_certificate=tmp_path / "cert.pem")


def trusting(pair: Pair) -> ssl.SSLContext:
    """A client that trusts the authority of a pair."""
    return ssl.create_default_context(cafile=pair.ca)


def get_over_tls(port: int, context: ssl.SSLContext) -> tuple[str | None, bytes]:
    """The protocol's version, and the reply to a GET."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    with context.wrap_socket(connection, server_hostname="127.0.0.1") as tls:
        tls.sendall(GET + b"Connection: close\r\n\r\n")
        received = b""
        while piece := tls.recv(65536):
            received += piece
        return tls.version(), received


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A certificate for this address."""
    return issue(tmp_path / "tls", "127.0.0.1")


def test_tls_from_version_1_2(loop_thread: Any, make_server: Any, pair: Pair) -> None:
    """1.3 where the client can, 1.2 where it must, nothing older, and no plain HTTP."""
    server = make_server(hello, tls_certificate=pair.certificate, tls_key=pair.key)
    loop_thread.run(server.start())
    for most, spoken in ((ssl.TLSVersion.TLSv1_3, "TLSv1.3"), (ssl.TLSVersion.TLSv1_2, "TLSv1.2")):
        context = trusting(pair)
        context.maximum_version = most
        version, reply = get_over_tls(server.port, context)
        assert version == spoken
        assert reply.endswith(b"hello")
    old = trusting(pair)
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")  # Or this client would refuse itself.
    with pytest.raises(ssl.SSLError):
        get_over_tls(server.port, old)


def test_slow_handshakes_are_closed_and_cost_others_nothing(
    wire: Any, loop_thread: Any, make_server: Any, pair: Pair
) -> None:
    """Ten seconds, whatever of one has arrived; a hundred of them hold up no other."""
    server = make_server(hello, tls_certificate=pair.certificate, tls_key=pair.key)
    loop_thread.run(server.start())
    began_s = time.monotonic()
    slow = [wire.connect(server.port, 20) for _ in range(100)]
    for number, connection in enumerate(slow):
        connection.sendall(b"\x16\x03\x01\x02\x00\x01"[: number % 7])
    assert get_over_tls(server.port, trusting(pair))[1].endswith(b"hello")
    assert time.monotonic() - began_s < 8
    for connection in slow:
        with connection:
            assert connection.recv(100) == b""
    assert time.monotonic() - began_s < 13


def test_a_certificate_that_the_server_cannot_use(
    loop_thread: Any, make_server: Any, pair: Pair, tmp_path: Path
) -> None:
    """Says so; nothing listens."""
    pair.key.write_bytes(issue(tmp_path / "other", "127.0.0.1").key.read_bytes())
    server = make_server(hello, tls_certificate=pair.certificate, tls_key=pair.key)
    with pytest.raises(ServerError, match="cannot speak TLS"):
        loop_thread.run(server.start())


def test_no_signal_handlers_are_taken(loop_thread: Any, make_server: Any) -> None:
    """They belong to the program around it."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    loop_thread.run(make_server(hello).start())
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_stop_finishes_what_is_in_flight(wire: Any, loop_thread: Any, make_server: Any) -> None:
    """Its answer arrives although new connections are refused already; idle ones are closed."""
    started = threading.Event()

    async def slow(_: Request) -> Response:
        started.set()
        await asyncio.sleep(0.5)
        return Response(200, [], b"finished")

    server = make_server(slow)
    loop_thread.run(server.start())
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(wire.exchange(server.port, GET + b"\r\n")))
    asking.start()
    with wire.connect(server.port) as idle:
        assert started.wait(5)
        stopping = asyncio.run_coroutine_threadsafe(server.stop(5), loop_thread.loop)
        time.sleep(0.2)
        with pytest.raises(ConnectionRefusedError):
            wire.connect(server.port)
        assert idle.recv(100) == b""
        assert stopping.result(5)
    asking.join()
    assert answers[0].endswith(b"finished")


def test_stop_finishes_what_is_in_flight_over_tls(loop_thread: Any, make_server: Any, pair: Pair) -> None:
    """There as well; a handshake that is under way is ended."""
    started = threading.Event()

    async def slow(_: Request) -> Response:
        started.set()
        await asyncio.sleep(0.3)
        return Response(200, [], b"finished")

    server = make_server(slow, tls_certificate=pair.certificate, tls_key=pair.key)
    loop_thread.run(server.start())
    answers: list[bytes] = []
    context = trusting(pair)
    asking = threading.Thread(target=lambda: answers.append(get_over_tls(server.port, context)[1]))
    asking.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as shaking:
        assert started.wait(5)
        assert server.connections == 2
        assert loop_thread.run(server.stop(5)) is True
        assert shaking.recv(100) == b""
    asking.join()
    assert answers[0].endswith(b"finished")


def test_slow_readers_over_tls_read_all(loop_thread: Any, make_server: Any, pair: Pair) -> None:
    """Longer than a goodbye is waited for, and than a client may be idle; `stop` waits for them."""
    size = 12_000_000

    async def large(_: Request) -> Response:
        return Response(200, [], bytes(size))

    options = {"header_read_timeout_s": 1, "tls_certificate": pair.certificate, "tls_key": pair.key}
    server = make_server(large, **options)
    loop_thread.run(server.start())
    for close in (b"Connection: close\r\n", b""):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        with trusting(pair).wrap_socket(connection, server_hostname="127.0.0.1") as tls:
            tls.sendall(GET + close + b"\r\n")
            received = tls.recv(1)
            stopping = (
                asyncio.run_coroutine_threadsafe(server.stop(15), loop_thread.loop) if not close else None
            )
            time.sleep(2.5)
            while piece := tls.recv(1 << 20):
                received += piece
        assert len(received.partition(b"\r\n\r\n")[2]) == size
    assert stopping.result(5)


def test_stopping_among_those_who_have_just_connected(wire: Any, loop_thread: Any, make_server: Any) -> None:
    """Who was accepted and has asked is answered."""
    for _ in range(5):
        server = make_server(hello)
        loop_thread.run(server.start())
        clients = [wire.connect(server.port) for _ in range(40)]
        for client in clients:
            client.sendall(GET + b"\r\n")
        loop_thread.run(server.stop(5))
        for client in clients:
            with client, contextlib.suppress(ConnectionResetError):  # Who was not accepted.
                answer = client.recv(1000)
                assert answer == b"" or answer.endswith(b"hello")
    assert loop_thread.errors == []


def test_leaving_finishes_what_is_in_flight(wire: Any, loop_thread: Any, make_server: Any) -> None:
    """And what has connected by then; later ones are left to the others on the port."""
    started = threading.Event()

    async def slow(_: Request) -> Response:
        started.set()
        await asyncio.sleep(0.3)
        return Response(200, [("connection", "close")], b"finished")

    server = make_server(slow)
    loop_thread.run(server.start())
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(wire.exchange(server.port, GET + b"\r\n")))
    asking.start()
    assert started.wait(5)
    assert loop_thread.run(server.leave(5)) is True
    asking.join()
    assert answers[0].endswith(b"finished")
    with pytest.raises(ConnectionRefusedError):
        wire.connect(server.port)


def test_stop_cancels_what_takes_too_long(wire: Any, loop_thread: Any, make_server: Any) -> None:
    """And says so."""
    started = threading.Event()

    async def endless(_: Request) -> Response:
        started.set()
        await asyncio.sleep(60)
        return Response(200)

    server = make_server(endless)
    loop_thread.run(server.start())
    with wire.connect(server.port) as connection:
        connection.sendall(GET + b"\r\n")
        assert started.wait(5)
        assert loop_thread.run(server.stop(0.1)) is False


def test_a_client_that_does_not_read_is_dropped(loop_thread: Any, make_server: Any) -> None:
    """Its connection ends by itself, so that `stop` ends too."""

    async def large(_: Request) -> Response:
        return Response(200, [], bytes(32_000_000))

    server = make_server(large, write_timeout_s=0.5)
    loop_thread.run(server.start())
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(GET + b"\r\n")
        time.sleep(0.2)
        assert loop_thread.run(server.stop(8))


@pytest.mark.parametrize("sent", [b"", b"G", GET, GET + b"\r\n"])
def test_slow_headers_and_idle_connections_are_closed(
    wire: Any, loop_thread: Any, make_server: Any, sent: bytes
) -> None:
    """In the header timeout, also where nothing was ever sent."""
    server = make_server(hello, header_read_timeout_s=0.3)
    loop_thread.run(server.start())
    started = time.monotonic()
    wire.exchange(server.port, sent)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (GET + b"Bad Header: 1\r\n\r\n", 400),
        (GET + b"X: a\x01b\r\n\r\n", 400),
        (GET + b"X: " + b"a" * 200_000 + b"\r\n\r\n", 431),
        (GET + b"X: 1\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 65_535 + b" HTTP/1.1\r\n\r\n", 414),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    ],
)
def test_requests_that_are_no_http(wire: Any, start: Any, sent: bytes, status: int) -> None:
    """They are refused in the one shape of every error, and the connection ends."""
    port = start(hello)
    head, _, body = wire.exchange(port, sent).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in head
    assert set(json.loads(body)) == {"error", "code", "id"}
    assert wire.get(port).endswith(b"hello")


def test_http2_is_not_spoken(wire: Any, start: Any) -> None:
    """The connection is closed at once, not left open."""
    started = time.monotonic()
    wire.exchange(start(hello), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
    assert time.monotonic() - started < 3


CHILD = """
import asyncio, sys
from serving.protocol.http import Response
from serving.protocol.http_app import HttpApp
from serving.protocol.server import EmbeddedServer

async def handle(request):
    return Response(200, [("connection", "close")], sys.argv[2].encode())

async def main():
    app = HttpApp(handle, refuse=lambda error, headers: Response(error.status), max_body_bytes=1000)
    server = EmbeddedServer(app, "127.0.0.1", int(sys.argv[1]))
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.leave(5)

asyncio.run(main())
"""


@contextlib.contextmanager
def sharing(names: Sequence[str]) -> Iterator[tuple[int, list[subprocess.Popen[str]]]]:
    """A port, and the processes that listen on it; one whose input ends leaves."""
    children: list[subprocess.Popen[str]] = []
    port = "0"
    try:
        for name in names:
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, port, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.append(child)
            assert child.stdout
            port = child.stdout.readline().strip()
        yield int(port), children
    finally:
        for child in children:
            child.communicate()


def test_two_processes_share_a_port(wire: Any) -> None:
    """The kernel spreads connections; when one leaves, the other serves them all."""
    with sharing(["first", "second"]) as (port, children):

        def answers(requests: int) -> set[bytes]:
            return {wire.get(port).rpartition(b"\r\n")[2] for _ in range(requests)}

        assert answers(64) == {b"first", b"second"}
        children[0].communicate()
        assert children[0].returncode == 0
        assert answers(16) == {b"second"}


def test_no_connection_is_lost_when_processes_leave(wire: Any) -> None:
    """Neither those that wait to be accepted, nor those that have asked for nothing yet."""
    over = threading.Event()
    answers: list[bytes] = []

    def ask() -> None:
        while not over.is_set():
            try:
                with wire.connect(port) as connection:
                    time.sleep(0.005)
                    connection.sendall(GET + b"\r\n")
                    answer = b"".join(iter(lambda: connection.recv(9999), b""))
                    answers.append(answer.rpartition(b"\r\n")[2])
            except OSError as error:
                answers.append(repr(error).encode())

    with sharing(["first", "second", "third"]) as (port, children):
        asking = [threading.Thread(target=ask) for _ in range(16)]
        for thread in asking:
            thread.start()
        for child in children[:2]:
            time.sleep(0.3)
            child.communicate()
        time.sleep(0.3)
        over.set()
        for thread in asking:
            thread.join()
    assert set(answers) == {b"first", b"second", b"third"}


def test_a_process_without_files_to_spare(wire: Any) -> None:
    """It says so, spins on nothing, and accepts again when it has some."""
    script = """
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
"""
    command = [sys.executable, "-c", script + CHILD, "0", "only"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        port = int(child.stdout.readline())
        crowd = [wire.connect(port) for _ in range(80)]
        time.sleep(1)
        cpu_s = process_cpu_s(child.pid)
        time.sleep(1)
        assert process_cpu_s(child.pid) - cpu_s < 0.5
        for connection in crowd:
            connection.close()
        assert wire.get(port).endswith(b"only")
        _, said = child.communicate()
    assert "cannot accept connections for now: Too many open files" in said


def process_cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    user_ticks, system_ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user_ticks) + int(system_ticks)) / os.sysconf("SC_CLK_TCK")
