"""Connections over real sockets: bodies, limits, headers, clients that go away."""

import asyncio
import contextlib
import email
import gc
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from serving.errors import BadShape
from serving.protocol.http import UNDECODABLE, Request, Response
from serving.protocol.http_connection import HttpConnection
from serving.protocol.request_reader import RequestReader

END = b"Host: h\r\nConnection: close\r\nX-Request-Id: r7\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


async def echo(request: Request) -> Response:
    """What arrived, as JSON."""
    said = {
        "method": request.method,
        "path": request.path,
        "query": request.query,
        "headers": request.headers.items(),
        "size": len(request.body),
        "body": request.body[:100].decode("latin-1"),
    }
    return Response(200, [("content-type", "application/json")], json.dumps(said).encode())


def post(*headers: bytes, body: bytes = b"", path: bytes = b"/") -> bytes:
    """A POST of raw parts."""
    return b"POST " + path + b" HTTP/1.1\r\n" + END + b"".join(headers) + b"\r\n" + body


def parsed(reply: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON body."""
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def assert_refused(reply: bytes, status: int, code: str) -> None:
    """The error is that one, as JSON, with the request's id in body and header."""
    got, body = parsed(reply)
    assert (got, body["code"], body["id"]) == (status, code, "r7")
    assert b"x-request-id: r7" in reply
    assert set(body) == {"error", "code", "id"}


def eventually(condition: Callable[[], bool]) -> None:
    """Wait a little for something that happens in another thread."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def test_a_request_arrives_whole(wire: Any, start: Any) -> None:
    """Method, decoded path, raw query, headers, body."""
    head = b"POST /v2/models/a%2e%20b?x=%20&y HTTP/1.1\r\n" + END
    body = b"X-A: 1\r\nx-a: 2\r\nContent-Length: 3\r\n\r\nabc"
    status, said = parsed(wire.exchange(start(echo), head + body))
    assert status == 200
    assert (said["method"], said["path"], said["query"]) == ("POST", "/v2/models/a. b", "x=%20&y")
    assert (said["size"], said["body"]) == (3, "abc")
    assert [value for name, value in said["headers"] if name == "x-a"] == ["1", "2"]


def test_chunked_with_trailers(wire: Any, start: Any) -> None:
    """Chunks are joined; trailers are ignored."""
    body = b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    assert parsed(wire.exchange(start(echo), post(CHUNKED, body=body)))[1]["body"] == "abcde"


def test_no_body(wire: Any, start: Any) -> None:
    """A GET is not waited for."""
    port = start(echo)
    assert parsed(wire.get(port))[1]["size"] == 0
    assert parsed(wire.exchange(port, post(b"Content-Length: 0\r\n")))[1]["size"] == 0


@pytest.mark.parametrize("value", [b"\xff\xfe", "é".encode()])
def test_header_values_that_are_no_text(wire: Any, start: Any, value: Any) -> None:
    """Present but unreadable, neither lost nor an error of its own."""
    reply = wire.exchange(start(echo), post(b"X-Precision: " + value + b"\r\n"))
    assert ["x-precision", UNDECODABLE] in parsed(reply)[1]["headers"]


def test_expect_continue(wire: Any, start: Any) -> None:
    """The server says to go on as soon as the body is asked for."""
    with wire.connect(start(echo)) as connection:
        connection.sendall(post(b"Content-Length: 3\r\nExpect: 100-continue\r\n"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_expect_continue_of_a_body_too_large(wire: Any, start: Any) -> None:
    """Refused without the body being sent."""
    reply = wire.exchange(start(echo), post(b"Content-Length: 100001\r\nExpect: 100-continue\r\n"))
    assert_refused(reply, 413, "too_large")


def test_head_has_no_body(wire: Any, start: Any) -> None:
    """Only its length."""
    reply = wire.exchange(start(echo), b"HEAD / HTTP/1.1\r\n" + END + b"\r\n")
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.endswith(b"\r\n\r\n")


def test_the_limit_by_length(wire: Any, start: Any) -> None:
    """Refused before a byte of it is read; exactly the limit is served."""
    port = start(echo)
    assert_refused(wire.exchange(port, post(b"Content-Length: 100001\r\n")), 413, "too_large")
    full = post(b"Content-Length: 100000\r\n", body=bytes(100_000))
    assert parsed(wire.exchange(port, full))[1]["size"] == 100_000


def test_the_limit_by_chunks(wire: Any, start: Any) -> None:
    """Counted as they arrive; the rest is not read."""
    port = start(echo)
    chunk = b"2710\r\n" + bytes(10_000) + b"\r\n"
    assert_refused(wire.exchange(port, post(CHUNKED, body=chunk * 11)), 413, "too_large")
    full = post(CHUNKED, body=chunk * 10 + b"0\r\n\r\n")
    assert parsed(wire.exchange(port, full))[1]["size"] == 100_000


def test_tiny_chunks(wire: Any, start: Any) -> None:
    """Thousands of them are joined; too many are refused whatever their size."""
    port = start(echo, max_body_chunks=5000)
    chunk = b"1\r\na\r\n"
    joined = wire.exchange(port, post(CHUNKED, body=chunk * 4000 + b"0\r\n\r\n"))
    assert parsed(joined)[1]["size"] == 4000
    assert_refused(wire.exchange(port, post(CHUNKED, body=chunk * 5001)), 413, "too_large")


@pytest.mark.parametrize(
    "sent", [post(b"Content-Length: 9\r\n", body=b"abc"), post(CHUNKED, body=b"1\r\na\r\n")]
)
def test_a_body_that_does_not_arrive(wire: Any, start: Any, sent: bytes) -> None:
    """Not waited for longer than agreed."""
    assert_refused(wire.exchange(start(echo, body_timeout_s=0.2), sent), 408, "body_timeout")


@pytest.mark.parametrize(
    "sent",
    [
        b"Content-Length: 100001\r\n\r\n" + b" " * 100_001,
        b"Content-Length: 300001\r\n\r\n" + b" " * 300_001,
        b"Content-Length: 100001\r\nExpect: 100-continue\r\n\r\n",
        CHUNKED + b"\r\n" + (b"2710\r\n" + b" " * 10_000 + b"\r\n") * 11,
        CHUNKED + b"\r\n" + b"1\r\n \r\n" * 70_000,
        b"Content-Length: 2\r\n\r\n{",
    ],
)
def test_a_client_whose_body_is_not_taken_is_told_to_connect_anew(wire: Any, start: Any, sent: bytes) -> None:
    """The server closes then: what is sent next on that connection would be lost."""
    port = start(echo, body_timeout_s=0.5, max_body_chunks=1000)
    reply = wire.exchange(port, b"POST / HTTP/1.1\r\nHost: h\r\n" + sent)
    assert int(reply.split()[1]) in {408, 413}
    assert b"\r\nconnection: close\r\n" in reply.lower()


def test_a_truncated_body(wire: Any, start: Any) -> None:
    """A client that stops sending, and may still listen, is told so."""
    port = start(echo)
    for sent_bytes in (post(b"Content-Length: 9\r\n", body=b"abc"), post(CHUNKED, body=b"9\r\nabc")):
        with wire.connect(port) as connection:
            connection.sendall(sent_bytes)
            connection.shutdown(1)
            reply = connection.recv(10_000)
            assert_refused(reply, 400, "bad_json")
            assert connection.recv(1) == b""


def test_errors_of_the_handler(wire: Any, start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A typed error keeps its status; any other becomes an internal one and a log line."""

    async def fail(request: Request) -> Response:
        raise BadShape("no") if request.path == "/typed" else RuntimeError("secret")

    port = start(fail)
    assert parsed(wire.get(port, "/typed"))[1]["code"] == "bad_shape"
    with caplog.at_level(logging.ERROR):
        status, body = parsed(wire.get(port))
    assert (status, body["code"]) == (500, "internal")
    assert "secret" not in body["error"]
    assert "secret" in caplog.text


def test_a_status_that_is_none(wire: Any, start: Any) -> None:
    """The server would abort the process."""

    async def odd(_: Request) -> Response:
        return Response(9999, [("x", "1")])

    assert wire.get(start(odd)).startswith(b"HTTP/1.1 500")


def test_a_client_that_goes_away(wire: Any, start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its handler is cancelled; nothing reaches the log."""
    events: list[str] = []

    async def slow(_: Request) -> Response:
        events.append("started")
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise
        return Response(200)

    port = start(slow)
    with wire.connect(port) as connection:
        connection.sendall(post())
        eventually(lambda: bool(events))
    eventually(lambda: len(events) == 2)
    assert events[1] == "cancelled"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_websockets_are_not_spoken(wire: Any, start: Any) -> None:
    """A request to upgrade is an ordinary GET here."""
    upgrade = (
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with wire.connect(start(echo)) as connection:
        connection.sendall(upgrade)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_keep_alive_and_pipelining(wire: Any, start: Any) -> None:
    """One connection, several requests, answers in order."""
    one = b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n%d"
    reply = wire.exchange(start(echo), one % (1, 1) + one % (2, 2) + post(path=b"/3"))
    places = [reply.find(b'"path": "/%d"' % number) for number in (1, 2, 3)]
    assert -1 < places[0] < places[1] < places[2]


def test_many_at_once(wire: Any, start: Any) -> None:
    """Concurrent requests get their own answers."""
    port = start(echo)
    right: list[int] = []

    def ask(size: int) -> None:
        reply = wire.exchange(port, post(b"Content-Length: %d\r\n" % size, body=b"x" * size))
        if parsed(reply)[1]["size"] == size:
            right.append(size)

    threads = [threading.Thread(target=ask, args=(size,)) for size in range(1, 33)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(right) == list(range(1, 33))


class Holding:
    """Answers no request with a body before it is let go."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._gate = asyncio.Event()
        self.waiting = 0

    async def __call__(self, request: Request) -> Response:
        if request.body:
            self.waiting += 1
            await self._gate.wait()
            self.waiting -= 1
        return await echo(request)

    def let_go(self) -> None:
        """All that wait, and those that come."""
        self._loop.call_soon_threadsafe(self._gate.set)


def sent(wire: Any, port: int, request: bytes) -> Any:
    """A connection on which a request is under way."""
    connection = wire.connect(port)
    connection.sendall(request)
    return connection


@pytest.mark.parametrize("form", [b"Content-Length: 900\r\n", CHUNKED])
def test_bodies_together_are_bounded(wire: Any, start: Any, loop_thread: Any, form: bytes) -> None:
    """Those beyond it are refused until others are answered; requests without a body are not."""
    handle = Holding(loop_thread.loop)
    port = start(handle, max_held_bytes=1000)
    request = post(form, body=b"384\r\n" + b"x" * 900 + b"\r\n0\r\n\r\n" if form == CHUNKED else b"x" * 900)
    with sent(wire, port, request) as first:
        eventually(lambda: handle.waiting == 1)
        reply = wire.exchange(port, request)
        assert_refused(reply, 503, "overloaded")
        assert b"retry-after: 1" in reply
        assert parsed(wire.get(port))[0] == 200
        handle.let_go()
        assert parsed(first.recv(65536))[1]["size"] == 900
    eventually(lambda: handle.waiting == 0)
    assert parsed(wire.exchange(port, request))[1]["size"] == 900


@pytest.mark.parametrize("form", [b"Content-Length: 50000\r\n", CHUNKED])
def test_a_body_that_is_alone_may_be_as_large_as_any(wire: Any, start: Any, form: bytes) -> None:
    """The bound on all of them is no other bound on one."""
    body = b"x" * 50000
    request = post(form, body=b"c350\r\n" + body + b"\r\n0\r\n\r\n" if form == CHUNKED else body)
    assert parsed(wire.exchange(start(echo, max_held_bytes=1000), request))[1]["size"] == 50000


def test_promises_of_large_bodies_hold_nothing(wire: Any, make_server: Any, loop_thread: Any) -> None:
    """What counts is what has arrived: a client that declares much and sends nothing shuts nobody out."""
    limits = {"max_body_bytes": 1 << 30, "max_held_bytes": 1 << 20}
    server = make_server(echo, app=limits)
    loop_thread.run(server.start())
    port, app = server.port, server._app
    with sent(wire, port, post(b"Content-Length: 900000000\r\n", body=b"x")):
        eventually(lambda: app.room.held_bytes == 1)
        body = b"x" * 1_000_000
        reply = wire.exchange(port, post(b"Content-Length: 1000000\r\n", body=body))
        assert parsed(reply)[1]["size"] == len(body)


def test_large_declared_bodies_arrive_whole(wire: Any, start: Any) -> None:
    """Piece by piece, counted, however many pieces there are."""
    size = 3_000_000
    port = start(echo, max_body_bytes=size, max_body_chunks=2)
    reply = wire.exchange(port, post(b"Content-Length: 3000000\r\n", body=b"x" * size))
    assert parsed(reply)[1]["size"] == size


def test_nothing_stays_held(wire: Any, make_server: Any, loop_thread: Any) -> None:
    """After answers, refusals, late and lost clients."""
    server = make_server(echo, app={"body_timeout_s": 0.3, "max_held_bytes": 5000})
    loop_thread.run(server.start())
    port, app = server.port, server._app
    wire.exchange(port, post(b"Content-Length: 3\r\n", body=b"abc"))
    wire.exchange(port, post(CHUNKED, body=b"3\r\nabc\r\n0\r\n\r\n"))
    wire.exchange(port, post(b"Content-Length: 100001\r\n"))
    wire.exchange(port, post(CHUNKED, body=b"5\r\nabc"))  # Late.
    with sent(wire, port, post(b"Content-Length: 100\r\n", body=b"abc")):
        eventually(lambda: app.room.held_bytes == 100)
    eventually(lambda: app.room.held_bytes == 0 and server.connections == 0)


def test_what_is_sent_ahead_is_bounded(wire: Any, make_server: Any, loop_thread: Any) -> None:
    """A client that sends on and on while it is answered is not read without end, and loses nothing."""
    handle = Holding(loop_thread.loop)
    server = make_server(handle)
    loop_thread.run(server.start())
    one = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5000\r\n\r\n" + bytes(5000)
    with wire.connect(server.port) as connection:
        connection.sendall(one)
        eventually(lambda: handle.waiting == 1)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.sendall(one * 10_000)
        assert server._app.room.held_bytes == 5000
        handle.let_go()
        connection.settimeout(5)
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_client_that_reads_nothing_is_asked_for_nothing_more(
    wire: Any, make_server: Any, loop_thread: Any
) -> None:
    """However much it sends ahead, one response at a time waits for it."""
    asked: list[int] = []

    async def large(_: Request) -> Response:
        asked.append(1)
        return Response(200, [], bytes(8_000_000))

    server = make_server(large)
    loop_thread.run(server.start())
    with wire.connect(server.port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 50)
        time.sleep(0.5)
        assert len(asked) == 1
        received = 0
        while received < 50 * 8_000_000:
            received += len(connection.recv(1 << 20))
    assert len(asked) == 50


def test_http_1_0(wire: Any, start: Any) -> None:
    """Closed after the answer, unless the client asks to keep it; then it is told."""
    port = start(echo)
    reply = wire.exchange(port, b"GET / HTTP/1.0\r\n\r\n")
    assert b"connection: close" in reply.partition(b"\r\n\r\n")[0]
    with wire.connect(port) as connection:
        for _ in range(2):
            connection.sendall(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert b"connection: keep-alive" in connection.recv(1000)


def test_what_a_response_says_of_itself(wire: Any, start: Any) -> None:
    """Its length and its time; RFC 9110, section 6.6.1."""
    reply = wire.get(start(echo))
    head, _, body = reply.partition(b"\r\n\r\n")
    message = email.message_from_bytes(head.partition(b"\r\n")[2])
    assert int(message["content-length"]) == len(body)
    told = parsedate_to_datetime(message["date"])
    assert abs((datetime.now(UTC) - told).total_seconds()) < 3


def test_a_response_that_cannot_be_written(wire: Any, start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of ours, which is logged; the client is told no more than that, and served on."""

    async def split(request: Request) -> Response:
        return Response(200, [("x-a", "b\r\nx-c: d")]) if request.path == "/split" else await echo(request)

    with wire.connect(start(split)) as connection:
        connection.sendall(b"GET /split HTTP/1.1\r\nHost: h\r\n\r\n")
        reply = connection.recv(10_000)
        assert reply.startswith(b"HTTP/1.1 500")
        assert b"x-c" not in reply
        connection.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
    assert "line break" in caplog.text


def test_garbage_after_a_request(wire: Any, start: Any) -> None:
    """The request is answered first, then the garbage is refused."""
    reply = wire.exchange(start(echo), b"GET /first HTTP/1.1\r\nHost: h\r\n\r\nGARBAGE\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200")
    assert reply.count(b"HTTP/1.1 400") == 1
    assert reply.index(b"/first") < reply.index(b"bad_request")


def test_nothing_is_read_after_the_last_request(wire: Any, start: Any) -> None:
    """What follows `Connection: close` is no request."""
    request = b"GET /%d HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    reply = wire.exchange(start(echo), request % 1 + request % 2)
    assert reply.count(b"HTTP/1.1") == 1
    assert b"/1" in reply


def test_headers_that_trickle_in(wire: Any, make_server: Any, loop_thread: Any) -> None:
    """The time for them is not given anew with every byte."""
    server = make_server(echo, header_read_timeout_s=0.5)
    loop_thread.run(server.start())
    began_s = time.monotonic()
    with wire.connect(server.port) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for byte in b"GET / HTTP/1.1\r\nHost: " + b"h" * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
    assert 0.4 < time.monotonic() - began_s < 3


@pytest.mark.parametrize("end", ["client", "response", "server"])
def test_the_last_response_is_read_whole(wire: Any, make_server: Any, loop_thread: Any, end: str) -> None:
    """By a client that reads slowly, and has sent something that nobody reads."""
    size = 3_000_000

    async def large(_: Request) -> Response:
        return Response(200, [("connection", "close")] if end == "response" else [], bytes(size))

    server = make_server(large, header_read_timeout_s=0.5)
    loop_thread.run(server.start())
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        slow.connect(("127.0.0.1", server.port))
        close = b"Connection: close\r\n" if end == "client" else b""
        slow.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n" + close + b"\r\n")
        received = slow.recv(1)
        stopping = (
            asyncio.run_coroutine_threadsafe(server.stop(10), loop_thread.loop) if end == "server" else None
        )
        time.sleep(1)  # Longer than a client may be idle.
        slow.sendall(b"GET /next HTTP/1.1\r\n\r\n")
        while piece := slow.recv(1 << 20):
            received += piece
    assert len(received.partition(b"\r\n\r\n")[2]) == size
    assert stopping is None or stopping.result(5)


def test_a_client_that_reads_slowly_is_not_late(wire: Any, make_server: Any, loop_thread: Any) -> None:
    """What it sent ahead is answered, however long it reads what came before."""

    async def answer(request: Request) -> Response:
        return Response(200, [], bytes(8_000_000)) if request.method == "GET" else await echo(request)

    server = make_server(answer, header_read_timeout_s=0.3, app={"body_timeout_s": 0.3})
    loop_thread.run(server.start())
    with wire.connect(server.port) as connection:
        connection.sendall(
            b"GET / HTTP/1.1\r\nHost: h\r\n\r\nPOST /up HTTP/1.1\r\nContent-Length: 6\r\n\r\nabc"
        )
        time.sleep(1)
        connection.sendall(b"def")
        reply = b""
        while b"/up" not in reply[8_000_000:]:
            reply += connection.recv(1 << 20)
    assert reply.count(b"HTTP/1.1 200") == 2
    assert b"abcdef" in reply


def test_half_a_head_does_not_hold_up_the_end(wire: Any, make_server: Any, loop_thread: Any) -> None:
    """Its client has a moment for the rest."""
    server = make_server(echo)
    loop_thread.run(server.start())
    with wire.connect(server.port) as connection:
        connection.sendall(b"G")
        time.sleep(0.1)
        began_s = time.monotonic()
        assert loop_thread.run(server.stop(8)) is True
        assert time.monotonic() - began_s < 3


def test_what_is_parsed_ahead_is_bounded(wire: Any, make_server: Any, loop_thread: Any) -> None:
    """Small requests become many times their size: they wait as bytes."""
    handle = Holding(loop_thread.loop)
    server = make_server(handle)
    loop_thread.run(server.start())
    first = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx"
    with wire.connect(server.port) as connection:
        connection.sendall(first + b"GET / HTTP/1.1\r\n\r\n" * 10_000)
        eventually(lambda: handle.waiting == 1)
        (one,) = server._connections
        assert len(one._reader.requests) < 1000
        handle.let_go()
        received = b""
        while received.count(b"HTTP/1.1 200") < 10_001:
            received += connection.recv(1 << 20)


def test_closed_connections_need_no_garbage_collector(wire: Any, start: Any) -> None:
    """A gateway puts that off; short connections would pile up meanwhile."""
    port = start(echo)

    def left() -> int:
        return sum(type(each) in {HttpConnection, RequestReader} for each in gc.get_objects())

    gc.collect()
    before = left()
    gc.disable()
    try:
        for _ in range(50):
            wire.get(port)
            wire.exchange(port, b"GARBAGE\r\n\r\n")
        eventually(lambda: left() <= before + 4)
    finally:
        gc.enable()
