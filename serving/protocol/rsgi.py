"""Granian's RSGI interface on one side, `handle(Request) -> Response` on the other.

What is refused here has the same JSON body and request id as any other error: the
gateway makes those responses, through `refuse`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import Any

from granian.rsgi import ProtocolClosed, ProtocolError

from serving.errors import (
    BadHeader,
    BadJson,
    BodyTimeout,
    InternalError,
    Overloaded,
    RequestError,
    TooLarge,
)
from serving.protocol.http import UNDECODABLE, Headers, Request, Response

Handle = Callable[[Request], Awaitable[Response]]
#: Makes (and counts) the response to an error. The headers are `None` where none could be read.
Refuse = Callable[[RequestError, Headers | None], Response]

#: The server spends far more on a chunk than on its bytes, and tells us of each one. At the
#: default limit of 64 MiB this allows chunks of 1 KiB; a body in 1-byte chunks ends here.
MAX_BODY_CHUNKS = 65_536
#: Of all bodies together: eight of the default limit.
MAX_HELD_BYTES = 536_870_912
#: A declared length is reserved up to here. Of a longer body only what has arrived is counted, or a few
#: clients could fill the memory with promises; telling costs a little for each piece that arrives.
MAX_PROMISED_BYTES = 1_048_576
RETRY_AFTER_S = 1
#: For the rest of a refused body, before the answer is sent all the same.
DISCARD_TIMEOUT_S = 1.0
#: How old a request is before its client is watched and its body's time limit is looked at.
SWEEP_INTERVAL_S = 0.05
_STATUSES = range(100, 600)

_log = logging.getLogger(__name__)


class RsgiApp:
    """An RSGI application around `handle`.

    A request whose client goes away is cancelled: `handle` sees `asyncio.CancelledError`
    and can count it; nothing is written. An exception that `handle` raises is logged and
    answered as an internal error.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        refuse: Refuse,
        max_body_bytes: int,
        max_held_bytes: int = MAX_HELD_BYTES,
        body_timeout_s: float = 10.0,
        max_body_chunks: int = MAX_BODY_CHUNKS,
        cancel_on_disconnect: bool = True,
    ) -> None:
        """Make the application.

        Args:
            handle: Answers a complete request.
            refuse: Answers an error that happens before `handle` runs, or in it.
            max_body_bytes: What a body may hold, as received.
            max_held_bytes: What the bodies of all requests together may hold. One that has it to itself is
                bounded by `max_body_bytes` alone.
            body_timeout_s: How long a body may take to arrive.
            max_body_chunks: Into how many chunks a body of unknown length may be split.
            cancel_on_disconnect: Whether `handle` is cancelled when its client goes away.
        """
        self._handle = handle
        self._refuse = refuse
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        #: Of bodies that arrive, or whose requests are not answered yet.
        self._held_bytes = 0
        self._body_timeout_s = body_timeout_s
        self._max_body_chunks = max_body_chunks
        self._cancel_on_disconnect = cancel_on_disconnect
        self._running: dict[asyncio.Task[Any], _Exchange] = {}
        self._is_sweeping = False

    @property
    def running(self) -> int:
        """Requests that are being read or answered."""
        return len(self._running)

    def cancel_running(self) -> None:
        """Cancel every request in flight; their connections are closed without a reply."""
        for task in tuple(self._running):
            task.cancel()

    def refusal(self, error: RequestError) -> Response:
        """The response, counted, to a client whose request was not even read."""
        return self._refuse(error, None)

    async def __rsgi__(self, scope: Any, proto: Any) -> None:
        """Serve one request. The server calls this."""
        if scope.proto != "http":
            proto.close(403)  # a WebSocket, which is not spoken here
            return
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("RSGI requests must run as asyncio tasks")
        loop = task.get_loop()
        exchange = self._running[task] = _Exchange(proto, task, loop.time())
        if not self._is_sweeping:
            self._is_sweeping = True
            loop.call_later(SWEEP_INTERVAL_S, self._sweep, loop)
        try:
            response = await self._respond(scope, exchange)
        finally:
            del self._running[task]
            self._held_bytes -= exchange.held_bytes
            if exchange.gone is not None:
                exchange.gone.cancel()
        if response is not None:
            _write(proto, response)

    __call__ = __rsgi__

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the bodies that are late, and have the server watch clients that wait for long.

        Both cost more than most requests do, so that no request pays until it is this old.
        """
        now_s = loop.time()
        for exchange in tuple(self._running.values()):
            age_s = now_s - exchange.started_s
            if age_s < SWEEP_INTERVAL_S:
                break  # In order of arrival: the others are younger.
            if exchange.is_reading:
                if age_s >= self._body_timeout_s:
                    exchange.end_reading()
            elif self._cancel_on_disconnect:
                exchange.watch()
        self._is_sweeping = bool(self._running)
        if self._is_sweeping:
            loop.call_later(SWEEP_INTERVAL_S, self._sweep, loop)

    async def _respond(self, scope: Any, exchange: _Exchange) -> Response | None:
        headers: Headers | None = None
        try:
            headers = read_headers(scope.headers)
            body = await self._read_whole_body(headers, exchange)
            return await self._handle(Request(scope.method, scope.path, scope.query_string, headers, body))
        except asyncio.CancelledError:
            if not exchange.is_client_gone:
                raise
            exchange.task.uncancel()
            return None
        except RequestError as error:
            return self._refuse(error, headers)
        except Exception:
            _log.exception("unhandled error while answering a request")
            return self._refuse(InternalError("internal error"), headers)

    async def _read_whole_body(self, headers: Headers, exchange: _Exchange) -> bytes:
        try:
            return await self._read_body(headers, exchange)
        except RequestError as error:
            # The server closes a connection that still holds some of a body. Its client must be told,
            # or it loses the request that it sends next.
            error.headers = (*error.headers, ("connection", "close"))
            raise

    async def _read_body(self, headers: Headers, exchange: _Exchange) -> bytes:
        declared = headers.get("content-length")
        chunked = "transfer-encoding" in headers
        if declared is None and not chunked:
            return b""
        exchange.is_reading = True
        try:
            if declared is None or chunked:
                return await self._read_chunks(headers, exchange, max_chunks=self._max_body_chunks)
            return await self._read_declared(declared, headers, exchange)
        except asyncio.CancelledError:
            if not exchange.is_late:
                raise
            exchange.task.uncancel()
            raise BodyTimeout(f"the body did not arrive within {self._body_timeout_s:g} s") from None
        except (ProtocolClosed, ProtocolError):
            raise BadJson("the body ended before it was complete") from None
        finally:
            exchange.is_reading = False

    async def _read_declared(self, declared: str, headers: Headers, exchange: _Exchange) -> bytes:
        # The server has already refused what is no number; it also ends the body at this length.
        if not (declared.isascii() and declared.isdigit()):
            raise BadHeader("Content-Length must be a number")
        if int(declared) > self._max_body_bytes:
            await self._discard(headers, exchange.proto)
            raise self._too_large()
        if int(declared) > MAX_PROMISED_BYTES:
            return await self._read_chunks(headers, exchange, max_chunks=None)
        if not self._holds(exchange, int(declared)):
            await self._discard(headers, exchange.proto)
            raise self._no_room()
        body: bytes = await exchange.proto()
        return body

    def _holds(self, exchange: _Exchange, size_bytes: int) -> bool:
        """Reserve room for more of a request's body, if there is any."""
        others_bytes = self._held_bytes - exchange.held_bytes
        if others_bytes and self._held_bytes + size_bytes > self._max_held_bytes:
            return False
        self._held_bytes += size_bytes
        exchange.held_bytes += size_bytes
        return True

    async def _read_chunks(self, headers: Headers, exchange: _Exchange, *, max_chunks: int | None) -> bytes:
        # One growing buffer, whose content `getvalue` hands out without a copy: memory stays
        # with the bytes received, whatever the chunks.
        buffer = BytesIO()
        chunks, size_bytes = 0, 0
        async for chunk in exchange.proto:
            chunks += 1
            size_bytes += len(chunk)
            if size_bytes > self._max_body_bytes:
                buffer.close()
                await self._discard(headers, exchange.proto)
                raise self._too_large()
            if not self._holds(exchange, len(chunk)):
                buffer.close()
                await self._discard(headers, exchange.proto)
                raise self._no_room()
            if max_chunks is not None and chunks > max_chunks:
                raise TooLarge(f"the body is split into more than {max_chunks} chunks")
            buffer.write(chunk)
        return buffer.getvalue()

    async def _discard(self, headers: Headers, proto: Any) -> None:
        """Take in what a refused client still sends, up to as much again as a body may hold.

        Most clients send everything before they read: closed at once, they would see a broken
        connection and never the reason. One that waits for 100 Continue sends nothing.
        """
        if "expect" in headers:
            return
        discarded_bytes = 0
        with contextlib.suppress(TimeoutError, ProtocolClosed, ProtocolError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                async for chunk in proto:
                    discarded_bytes += len(chunk)
                    if discarded_bytes > self._max_body_bytes:
                        return

    def _no_room(self) -> Overloaded:
        return Overloaded(
            "the bodies of other requests fill the memory that there is for them", RETRY_AFTER_S
        )

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._max_body_bytes} bytes")


class _Exchange:
    """One request on its way through the adapter."""

    __slots__ = ("gone", "held_bytes", "is_late", "is_reading", "proto", "started_s", "task")

    def __init__(self, proto: Any, task: asyncio.Task[Any], started_s: float) -> None:
        self.proto = proto
        self.task = task
        self.started_s = started_s
        self.is_reading = False
        #: Of its body, as far as it is counted.
        self.held_bytes = 0
        #: Whether reading was ended because it took too long.
        self.is_late = False
        #: Done once the client has gone; None until somebody watches.
        self.gone: Any = None

    @property
    def is_client_gone(self) -> bool:
        """Whether the client went away."""
        return self.gone is not None and self.gone.done()

    def end_reading(self) -> None:
        """The body is late."""
        if not self.is_late:
            self.is_late = True
            self.task.cancel()

    def watch(self) -> None:
        """Cancel the request when its client goes away."""
        if self.gone is None:
            self.gone = self.proto.client_disconnect()
            self.gone.add_done_callback(self._client_left)

    def _client_left(self, gone: Any) -> None:
        if not gone.cancelled():
            self.task.cancel()


def read_headers(rsgi_headers: Any) -> Headers:
    """The request's headers, none of them lost.

    The server leaves a value that is not ASCII out of `items()` but its name in `keys()`:
    such a header gets the value `UNDECODABLE` here, so that a mangled declaration is
    refused rather than overlooked.
    """
    pairs: list[tuple[str, str]] = rsgi_headers.items()
    headers = Headers(pairs)
    names: list[str] = rsgi_headers.keys()
    if len(names) != len(headers):
        lost = [(name, UNDECODABLE) for name in names if name not in headers]
        headers = Headers(pairs + lost)
    return headers


def _write(proto: Any, response: Response) -> None:
    # The server aborts the whole process on a status that is none.
    status = response.status if response.status in _STATUSES else 500
    try:
        if response.body:
            proto.response_bytes(status, response.headers, response.body)
        else:
            proto.response_empty(status, response.headers)
    except (ProtocolClosed, ProtocolError):
        _log.debug("the client went away before the response was written")
