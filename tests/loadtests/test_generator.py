"""The generator sends when requests are due, whatever the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from loadtests.open_loop import Exchange, Mix, Outcome, send_all
from loadtests.open_loop.connection import UNREADABLE

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Precision-Tier: fp32\r\n\r\nok"
Reply = Callable[["Server", int], bytes | None]


class State:
    """What the connections of one server share."""

    def __init__(self) -> None:
        self.requests = 0
        self.open: set[Server] = set()
        self.closed = asyncio.Event()


class Server(asyncio.Protocol):
    """Answers each request with what `reply` returns for its number; None: not yet."""

    def __init__(self, reply: Reply, state: State) -> None:
        self.reply, self.state = reply, state

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.state.open.add(self)
        self.state.closed.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.open.discard(self)
        if not self.state.open:
            self.state.closed.set()

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(b"POST ")):
            number = self.state.requests
            self.state.requests += 1
            if (reply := self.reply(self, number)) is not None:
                self.transport.write(reply)


def run(
    reply: Reply,
    due_s: list[float],
    *,
    connections: int = 8,
    tiers: frozenset[bytes] | None = None,
    drain_s: float = 5.0,
) -> Outcome:
    """One run against a server in the same loop."""

    async def both() -> Outcome:
        loop, state = asyncio.get_running_loop(), State()
        server = await loop.create_server(lambda: Server(reply, state), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        mix = Mix((Exchange.post(url, b"body", {}, tiers),))
        random = np.random.default_rng(0)
        async with server:
            due = np.array(due_s)
            found = await send_all(url, mix, due, random, connections=connections, drain_s=drain_s)
            await state.closed.wait()
            return found

    return asyncio.run(both())


def test_every_request_is_sent_and_answered() -> None:
    """In order, none early."""
    found = run(lambda *_: OK, [0.0, 0.01, 0.01, 0.03])
    assert found.is_success.all()
    assert np.all(found.sent_s >= found.due_s)
    assert np.all(found.done_s >= found.sent_s)


def test_a_stall_of_the_server_counts_for_the_requests_behind_it() -> None:
    """Two connections; the server holds all answers for 0.3 s: what was due meanwhile waits, and shows."""
    held: list[Server] = []

    def reply(server: Server, number: int) -> bytes | None:
        if number == 0:
            asyncio.get_running_loop().call_later(0.3, lambda: [one.transport.write(OK) for one in held])
        if number < 2:
            held.append(server)
            return None
        return OK

    due_s = [0.0, 0.0, 0.1, 0.2]
    found = run(reply, due_s, connections=2)
    assert found.is_success.all()
    assert found.waited.tolist() == [False, False, True, True]
    assert found.latencies_s[2] >= 0.19
    assert found.latencies_s[3] >= 0.09
    assert not found.summary()["kept_up"]


def test_without_a_bound_in_the_way_later_requests_do_not_wait() -> None:
    """Open loop: the first is never answered, the others are, on time."""
    found = run(lambda _, number: None if number == 0 else OK, [0.0, 0.02, 0.04], drain_s=0.2)
    assert found.status.tolist() == [0, 200, 200]
    assert found.latencies_s[0] >= 0.2
    assert found.summary()["failures"] == {"no answer": 1}


def test_a_lost_connection_is_a_failure_and_is_replaced() -> None:
    """One connection only: the second request needs a new one."""

    def reply(server: Server, number: int) -> bytes | None:
        if number == 0:
            server.transport.abort()
            return None
        return OK

    found = run(reply, [0.0, 0.05], connections=1)
    assert found.summary()["failures"] == {"connection lost": 1}
    assert found.status[1] == 200


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        OK,
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_replies_are_read_in_whatever_pieces_they_come(reply: bytes, piece: int) -> None:
    """Two requests over one connection: the second needs the end of the first to be found."""

    def in_pieces(server: Server, _: int) -> None:
        for start in range(0, len(reply), piece):
            asyncio.get_running_loop().call_later(
                start * 1e-5, server.transport.write, reply[start : start + piece]
            )

    found = run(in_pieces, [0.0, 0.0], connections=1)
    assert found.status.tolist() == [200, 200]


def test_a_reply_without_a_length_is_unreadable() -> None:
    """It is counted, not waited for."""
    found = run(lambda *_: b"HTTP/1.1 200 OK\r\n\r\nok", [0.0])
    assert found.status.tolist() == [UNREADABLE]


@pytest.mark.parametrize(("tiers", "violations"), [({b"fp32"}, 0), ({b"fp16"}, 2), (None, 0)])
def test_an_answer_by_another_tier_is_a_violation(tiers: set[bytes] | None, violations: int) -> None:
    """The server says fp32."""
    found = run(lambda *_: OK, [0.0, 0.0], tiers=None if tiers is None else frozenset(tiers))
    assert found.summary()["precision_violations"] == violations


@pytest.mark.parametrize(
    ("header", "unannounced"), [(b"Retry-After: 2\r\n", 0), (b"", 2), (b"retry-after: 0\r\n", 2)]
)
def test_a_refusal_that_does_not_say_when_to_come_back_is_counted(header: bytes, unannounced: int) -> None:
    """Each 503 is looked at."""
    refusal = b"HTTP/1.1 503 Busy\r\n" + header + b"content-length: 0\r\n\r\n"
    found = run(lambda *_: refusal, [0.0, 0.0])
    assert (found.status.tolist(), found.unannounced) == ([503, 503], unannounced)
    assert found.refused == {("", 503): 2}
