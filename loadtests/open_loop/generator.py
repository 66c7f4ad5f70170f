"""Sends each request when it is due, over a bounded number of connections, and notes when it is answered.

The time of a request counts from the moment at which it was due, not from when it could be sent: a
server that stalls delays the requests behind it too, and a generator that waited for its answers
would leave those out ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np

from loadtests.open_loop.arrivals import FloatArray
from loadtests.open_loop.connection import LOST, Connection
from loadtests.open_loop.exchange import Exchange, Mix
from loadtests.open_loop.outcome import Outcome
from loadtests.open_loop.timer import Timer

#: Before the first request is due: all connections are open by then.
LEAD_S = 0.05
#: Between two wake-ups: at higher rates requests leave in small groups, which are late by less than this.
TICK_S = 0.0001
#: A refusal that names the seconds after which to come back.
OVERLOADED = 503
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *[1-9][0-9]*\r", re.IGNORECASE)


class Generator:
    """One run.

    Args:
        exchanges: of each request, in the order in which they are due.
        due_s: from the start, ascending.
        connections: bound on requests in flight; those beyond it wait, and their waiting counts.
    """

    def __init__(self, exchanges: Sequence[Exchange], due_s: FloatArray, connections: int) -> None:
        count = len(due_s)
        self._exchanges, self._due_s = exchanges, due_s.tolist()
        self._bound = connections
        self._idle: deque[Connection] = deque()
        self._waiting: deque[int] = deque()
        self._next, self._unanswered, self._start_s = 0, count, 0.0
        self._sent_s, self._done_s = [np.nan] * count, [np.nan] * count
        self._status, self._waited = [0] * count, [False] * count
        self._violations, self._unannounced = 0, 0
        self._refused: Counter[tuple[str, int]] = Counter()
        self._finished, self._closed = asyncio.Event(), asyncio.Event()
        self._open: set[Connection] = set()
        self._reconnecting: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def run(self, host: str, port: int, drain_s: float) -> Outcome:
        """Send everything, then wait up to `drain_s` for what is unanswered."""
        self._address = host, port
        await asyncio.gather(*(self._connect() for _ in range(self._bound)))
        self._start_s = time.monotonic() + LEAD_S
        self._timer = Timer(self._send_due)
        self._timer.set(self._start_s)
        if not self._unanswered:
            self._finished.set()
        last_s = (self._due_s[-1] if self._due_s else 0.0) + LEAD_S
        try:
            await asyncio.wait_for(self._finished.wait(), last_s + drain_s)
        except TimeoutError:
            pass  # What is unanswered by now is reported as such.
        finally:
            end_s = time.monotonic() - self._start_s
            await self._close()
        return Outcome(
            due_s=np.array(self._due_s),
            sent_s=np.array(self._sent_s) - self._start_s,
            done_s=np.array(self._done_s) - self._start_s,
            status=np.array(self._status, dtype=np.int64),
            waited=np.array(self._waited, dtype=bool),
            violations=self._violations,
            end_s=end_s,
            unannounced=self._unannounced,
            refused=self._refused,
        )

    async def _close(self) -> None:
        """Leave no connection open."""
        self._is_over = True
        self._timer.close()
        for task in self._reconnecting:
            task.cancel()
        await asyncio.gather(*self._reconnecting, return_exceptions=True)
        for connection in self._open:
            connection.close()
        if self._open:
            await self._closed.wait()

    def answered(self, connection: Connection, status: int, head: bytes) -> None:
        """A reply is complete."""
        number = connection.number
        if number < 0:
            return
        self._done_s[number], self._status[number] = time.monotonic(), status
        if not 200 <= status < 300:  # noqa: PLR2004  Success.
            self._refused[self._exchanges[number].label, status] += 1
        elif not self._exchanges[number].accepts(head):
            self._violations += 1
        if status == OVERLOADED and not _RETRY_AFTER.search(head):
            self._unannounced += 1
        self._one_less(connection)
        self._make_idle(connection)

    def lost(self, connection: Connection) -> None:
        """The connection is gone: open another one."""
        self._open.discard(connection)
        if self._is_over:
            if not self._open:
                self._closed.set()
            return
        if connection.number >= 0:
            self._done_s[connection.number], self._status[connection.number] = time.monotonic(), LOST
            self._one_less(connection)
        elif connection in self._idle:
            self._idle.remove(connection)
        task = asyncio.get_running_loop().create_task(self._reconnect())
        self._reconnecting.add(task)
        task.add_done_callback(self._reconnecting.discard)

    def _send_due(self) -> None:
        """All that is due by now."""
        now_s = time.monotonic()
        due_s, elapsed_s = self._due_s, now_s - self._start_s
        number = self._next
        while number < len(due_s) and due_s[number] <= elapsed_s:
            if self._idle:
                self._send(self._idle.popleft(), number)
            else:
                self._waiting.append(number)
                self._waited[number] = True
            number += 1
        self._next = number
        if number < len(due_s):
            self._timer.set(max(self._start_s + due_s[number], now_s + TICK_S))

    def _send(self, connection: Connection, number: int) -> None:
        self._sent_s[number] = time.monotonic()
        connection.send(number, self._exchanges[number].wire)

    def _make_idle(self, connection: Connection) -> None:
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            self._idle.append(connection)

    def _one_less(self, connection: Connection) -> None:
        connection.number = -1
        self._unanswered -= 1
        if not self._unanswered:
            self._finished.set()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self), *self._address)
        self._open.add(connection)
        self._make_idle(connection)

    async def _reconnect(self) -> None:
        while True:
            try:
                return await self._connect()
            except OSError:
                await asyncio.sleep(0.05)


async def send_all(
    url: str,
    mix: Mix,
    due_s: FloatArray,
    random: np.random.Generator,
    *,
    connections: int,
    drain_s: float = 10.0,
) -> Outcome:
    """One open-loop run against a server.

    Args:
        url: its host and port count; paths are the exchanges'.
        mix: what is sent.
        due_s: when, from the start.
        random: draws from the mix.
        connections: bound on requests in flight.
        drain_s: to wait for answers after the last request was due.

    Raises:
        OSError: nothing listens there.
    """
    parts = urlsplit(url)
    exchanges = [mix.exchanges[index] for index in mix.draw(len(due_s), random).tolist()]
    generator = Generator(exchanges, due_s, connections)
    gc.collect()
    gc.disable()  # A collection in the middle would look like a stall of the server.
    try:
        return await generator.run(parts.hostname or "127.0.0.1", parts.port or 80, drain_s)
    finally:
        gc.enable()
