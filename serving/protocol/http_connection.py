"""One client's connection: requests in, responses out, in order and in time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import cast

from serving.errors import BadJson
from serving.protocol.http import Response
from serving.protocol.http_app import HttpApp
from serving.protocol.http_wire import CONTINUE, encode_head, has_body
from serving.protocol.request_reader import ReadRequest
from serving.protocol.write_batch import WriteBatch

#: For a client to read the last response and close, while what it still sends is discarded.
LINGER_S = 1.0
#: Of requests that are sent before the last one is answered, until no more is read.
MAX_AHEAD_BYTES = 65_536
#: Responses up to here are copied, so that head and body go out as one, with those of others.
_MAX_COPIED_BYTES = 65_536
#: Read at once of what may be many requests.
_MAX_PIECE_BYTES = 16_384
_CLOSE = ("connection", "close")

_log = logging.getLogger(__name__)


class HttpConnection(asyncio.Protocol):
    """Reads a request, has it answered, writes the response; then the next one.

    Reading goes on while a request is answered, as far as `MAX_AHEAD_BYTES`, so that a client that
    goes away is noticed, and its request cancelled.
    """

    def __init__(
        self,
        app: HttpApp,
        head_timeout_s: float,
        date: Callable[[], str],
        writes: WriteBatch,
        on_lost: Callable[[HttpConnection], None],
    ) -> None:
        """A connection that is about to be made.

        Args:
            app: what answers.
            head_timeout_s: how long the next request's head may take to arrive, idle time included.
            date: the line of that header.
            writes: where its responses wait for those of other connections.
            on_lost: is told when it has ended.
        """
        self._app = app
        self._head_timeout_s = head_timeout_s
        self._date = date
        self._writes = writes
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = app.reader()
        self._transport: asyncio.Transport | None = None
        self.is_lost = False
        #: When the client must have sent what it is expected to.
        self.deadline_s = math.inf
        self._answering: asyncio.Task[None] | None = None
        #: Of the request that is answered, taken from the room for bodies.
        self._held_bytes = 0
        #: What has arrived while a request is answered, and its size.
        self._ahead: list[bytes] = []
        self._ahead_bytes = 0
        self._is_reading_paused = self._is_writing_paused = False
        self._is_body_timed = False
        #: A response that waits to be written.
        self._unwritten = b""
        #: Whether the connection ends with the response that is under way.
        self._is_last = False
        #: Bytes taken in since the last response; None before.
        self._discarded_bytes: int | None = None

    @property
    def is_made(self) -> bool:
        """Whether there is a client by now: over TLS, one that has shaken hands."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins with a request's head."""
        self._transport = cast("asyncio.Transport", transport)
        # No more is asked for before all is written.
        self._transport.set_write_buffer_limits(high=_MAX_COPIED_BYTES, low=0)
        self.deadline_s = self._loop.time() + self._head_timeout_s

    def connection_lost(self, error: Exception | None) -> None:
        """The client has gone, or was let go."""
        self.is_lost = True
        self._unwritten = b""
        if self._answering is not None:
            self._answering.cancel()
            self._release()  # A task that has not begun runs no `finally`.
        self._reader.close()
        self._ahead.clear()
        self._on_lost(self)

    def eof_received(self) -> None:
        """Nobody sends any more: taken for gone, since it mostly is. The transport closes."""
        reader = self._reader
        if reader.is_in_body and self._answering is None and self._discarded_bytes is None:
            error = BadJson("the body ended before it was complete")
            self._say(self._app.refusal(error, reader.headers))

    def data_received(self, data: bytes) -> None:
        """Some of a request, of several, or of one that was refused."""
        if self._discarded_bytes is not None:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > self._app.max_body_bytes:
                self._open.abort()
        elif self._answering is not None or self._is_writing_paused:
            self._hold(data)
        else:
            self._feed(data)
            self._proceed()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered: it is asked for nothing more."""
        self._is_writing_paused = True

    def resume_writing(self) -> None:
        """All is written."""
        self._is_writing_paused = False
        if self._discarded_bytes is not None:
            self._linger()
        elif self._answering is None:
            self._is_body_timed = False
            self.deadline_s = self._loop.time() + self._head_timeout_s
            self._proceed()

    def expire(self) -> None:
        """`deadline_s` has passed."""
        if self._is_writing_paused:
            return  # The kernel ends the connections of clients that do not read.
        if self._open.is_closing():
            if not self._open.get_write_buffer_size():
                self._open.abort()  # Over TLS a client is waited for to say goodbye.
        elif self._discarded_bytes is None and self._reader.is_in_body:
            self._dismiss(self._app.late(self._reader.headers))
        else:
            self._close()

    def finish(self) -> None:
        """End after the request that is under way, or at once if there is none."""
        self._is_last = True
        if self._answering is not None or self._discarded_bytes is not None:
            return
        if self._reader.is_in_body:
            return
        if self._reader.has_begun:
            self.deadline_s = min(self.deadline_s, self._loop.time() + LINGER_S)
        else:
            self._end()

    def abort(self) -> None:
        """End now, without an answer."""
        self._open.abort()

    @property
    def _open(self) -> asyncio.Transport:
        if self._transport is None:
            raise RuntimeError("the connection has not been made")
        return self._transport

    def _hold(self, data: bytes) -> None:
        """Keep what was sent ahead; beyond a limit, read no more of it."""
        self._ahead.append(data)
        self._ahead_bytes += len(data)
        if self._ahead_bytes > MAX_AHEAD_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self._open.pause_reading()

    def _feed(self, data: bytes) -> None:
        """Have it read, piece by piece, until there is something to answer; the rest waits."""
        reader, start = self._reader, 0
        while True:
            # A piece of small requests becomes many times its size.
            stop = start + max(_MAX_PIECE_BYTES, reader.missing_bytes)
            reader.feed(data[start:stop] if start or stop < len(data) else data)
            start = stop
            if start >= len(data):
                return
            if reader.requests or reader.error is not None:
                self._hold(data[start:])
                return

    def _proceed(self) -> None:
        """Answer what has been read; else read on."""
        reader = self._reader
        while not self._is_writing_paused:
            if reader.requests:
                self.deadline_s = math.inf
                self._is_body_timed = False
                read = reader.requests.popleft()
                self._held_bytes = read.held_bytes
                self._answering = self._loop.create_task(self._answer(read))
                return
            if reader.error is not None:
                self._dismiss(self._app.refusal(reader.error, reader.error_headers))
                return
            if not self._ahead:
                break
            ahead = b"".join(self._ahead)
            self._ahead.clear()
            self._ahead_bytes = 0
            self._feed(ahead)
        if reader.wants_continue:
            reader.wants_continue = False
            self._write_now(CONTINUE)
        if reader.is_in_body and not self._is_body_timed:
            self._is_body_timed = True
            self.deadline_s = self._loop.time() + self._app.body_timeout_s
        if not self._ahead:
            self._read_on()

    async def _answer(self, read: ReadRequest) -> None:
        try:
            response = await self._app.answer(read.request)
        except asyncio.CancelledError:
            self._open.abort()
            raise
        finally:
            self._release()
        self._respond(response, read)
        if self._is_last:
            self._end()
            return
        self.deadline_s = self._loop.time() + self._head_timeout_s
        self._proceed()

    def flush(self) -> None:
        """Write the response that waits to be written, if there is one."""
        if self._unwritten:
            unwritten, self._unwritten = self._unwritten, b""
            self._write_now(unwritten)

    def _write_now(self, data: bytes) -> None:
        self.flush()
        if not self._open.is_closing():
            self._open.write(data)

    def _respond(self, response: Response, read: ReadRequest) -> None:
        """Write a response, soon. Sets `_is_last` where the client or the response wants it."""
        extra = self._date()
        says_close = _CLOSE in response.headers
        self._is_last = self._is_last or not read.keeps_alive or says_close
        if self._is_last and not says_close:
            extra += "connection: close\r\n"
        elif read.is_old and not says_close:
            extra += "connection: keep-alive\r\n"
        head, body = self._encoded(response, extra)
        if read.request.method == "HEAD":
            body = b""
        self.flush()
        if len(body) <= _MAX_COPIED_BYTES:
            self._unwritten = head + body
            self._writes.add(self)
        else:
            self._write_now(head)
            self._write_now(body)

    def _encoded(self, response: Response, extra: str) -> tuple[bytes, bytes]:
        """Head and body."""
        try:
            head = encode_head(response, extra)
        except (ValueError, UnicodeError):
            _log.exception("a response cannot be written")
            response = self._app.broken()
            head = encode_head(response, extra)
        return head, response.body if has_body(response.status) else b""

    def _release(self) -> None:
        self._app.room.release(self._held_bytes)
        self._held_bytes = 0
        self._answering = None

    def _dismiss(self, response: Response) -> None:
        """Say why nothing more is answered, and end."""
        self._say(response)
        self._end()

    def _say(self, response: Response) -> None:
        if _CLOSE not in response.headers:
            response.headers.append(_CLOSE)
        head, body = self._encoded(response, self._date())
        self._write_now(head + body)

    def _end(self) -> None:
        """Close, once all is written and the client has had a moment to read it.

        Until then what it still sends is taken in: data that nobody has read when a connection is
        closed makes the kernel reset it, and the client may never see the response.
        """
        self.flush()
        self._reader.close()
        self._ahead.clear()
        self._discarded_bytes = 0
        if not self._is_writing_paused:
            self._linger()
        self._read_on()

    def _linger(self) -> None:
        """All is written, or will be in a moment."""
        transport = self._open
        if transport.is_closing():
            return
        if transport.can_write_eof():
            transport.write_eof()
            self.deadline_s = self._loop.time() + LINGER_S
        else:
            self._close()

    def _close(self) -> None:
        self._open.close()
        self.deadline_s = self._loop.time() + LINGER_S

    def _read_on(self) -> None:
        if self._is_reading_paused and not self._open.is_closing():
            self._is_reading_paused = False
            self._open.resume_reading()
