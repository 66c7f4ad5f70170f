"""`Connection`: one kept-alive HTTP/1.1 connection that carries a request at a time."""

from __future__ import annotations

import asyncio
import re
from typing import Protocol, cast

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
#: Statuses of replies that never came, beside HTTP's.
LOST, UNREADABLE, UNANSWERED = -1, -2, 0


class Owner(Protocol):
    """Who is told what becomes of a connection's request."""

    def answered(self, connection: Connection, status: int, head: bytes) -> None:
        """A reply is complete, or cannot be read (`UNREADABLE`); the connection is free."""

    def lost(self, connection: Connection) -> None:
        """The connection is gone, and a request on it with it."""


class Connection(asyncio.Protocol):
    """Sends prepared bytes and finds where each reply ends.

    Bodies are counted, not kept: what they say is another test's matter.
    """

    __slots__ = ("_head", "_is_chunked", "_missing", "_owner", "_received", "_transport", "number")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._head: bytes | None = None
        self._missing = 0
        self._is_chunked = False
        #: Of the request under way; -1: none.
        self.number = -1

    def send(self, number: int, wire: bytes) -> None:
        """Start a request."""
        self.number = number
        if self._transport is not None:
            self._transport.write(wire)

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._transport = None
        self._owner.lost(self)

    def data_received(self, data: bytes) -> None:
        """A part of a reply, nearly always the whole of it."""
        if self._head is None:
            self._received = self._received + data if self._received else data
            end = self._received.find(_HEAD_END)
            if end < 0:
                return
            self._begin_body(self._received[: end + 2], self._received[end + 4 :])
        elif self._is_chunked:
            self._received = (self._received + data)[-len(_LAST_CHUNK) :]
        else:
            self._missing -= len(data)
        if self._received == _LAST_CHUNK if self._is_chunked else self._missing <= 0:
            self._finish()

    def _begin_body(self, head: bytes, body: bytes) -> None:
        self._head = head
        length = _LENGTH.search(head)
        if length is not None:
            self._missing, self._received = int(length[1]) - len(body), b""
        elif _CHUNKED.search(head):
            self._is_chunked, self._received = True, body[-len(_LAST_CHUNK) :]
        else:
            # Neither a length nor chunks: only the end of the connection would tell.
            self._head = b"HTTP/1.1 %d\r\n" % UNREADABLE + head
            self._missing, self._received = 0, b""

    def _finish(self) -> None:
        head, self._head = self._head or b"", None
        self._received, self._is_chunked, self._missing = b"", False, 0
        try:
            status = int(head[9:12])
        except ValueError:
            status = UNREADABLE
        self._owner.answered(self, status, head)
        if _CLOSE.search(head):
            self.close()
