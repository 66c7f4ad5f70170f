"""Sends what no HTTP library would, and reads what comes back."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from loadtests.fuzz.mutations import Sent

#: For an answer, and for the server to close after a client that has said all it will.
ANSWER_TIMEOUT_S = 30.0
#: For a request without an end the server may wait; how long its client does before it closes its side.
PATIENCE_S = 0.3
_MAX_HEAD_BYTES = 1 << 20
_BODILESS = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class Reply:
    """A response: header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class NoAnswer(Exception):
    """The server closed the connection or kept silent where an answer was due."""


class Client:
    """One connection at a time, kept as long as the server keeps it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, sent: Sent) -> list[Reply]:
        """The answers to a request: one, or to bytes that are no request any number.

        Raises:
            NoAnswer: none came where one was due, or the connection was left open.
        """
        if not sent.is_framed:
            return await self._exchange_bytes(sent.wire)
        reader, writer = await self._connected()
        has_body = not sent.wire.startswith(b"HEAD ")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                with contextlib.suppress(
                    ConnectionError
                ):  # Refused before all was sent: the answer says why.
                    writer.write(sent.wire)
                    await writer.drain()
                reply = await _read_reply(reader, has_body)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise NoAnswer(repr(error)) from None
        if reply.headers.get("connection") == "close" or reader.at_eof():
            await self.close()
        return [reply]

    async def _exchange_bytes(self, wire: bytes) -> list[Reply]:
        reader, writer = await asyncio.open_connection(*self._address, limit=_MAX_HEAD_BYTES)
        received = bytearray()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                with contextlib.suppress(ConnectionError):
                    writer.write(wire)
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(PATIENCE_S):
                            await _read_all(reader, received)
                    writer.write_eof()
                    await _read_all(reader, received)
        except TimeoutError:
            raise NoAnswer("the connection stayed open") from None
        finally:
            writer.close()
        return await replies_in(bytes(received), has_body=not wire.startswith(b"HEAD "))

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None and self._streams[0].at_eof():
            await self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=_MAX_HEAD_BYTES)
        return self._streams

    async def close(self) -> None:
        """Leave no connection open."""
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def replies_in(received: bytes, *, has_body: bool = True) -> list[Reply]:
    """All that came on a connection until it was closed; a last one that was cut off is left out."""
    reader = asyncio.StreamReader(limit=_MAX_HEAD_BYTES)
    reader.feed_data(received)
    reader.feed_eof()
    replies: list[Reply] = []
    with contextlib.suppress(asyncio.IncompleteReadError):
        while not reader.at_eof():
            replies.append(await _read_reply(reader, has_body))
    return replies


async def _read_all(reader: asyncio.StreamReader, received: bytearray) -> None:
    while piece := await reader.read(65_536):
        received += piece


async def _read_reply(reader: asyncio.StreamReader, has_body: bool) -> Reply:
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        if status >= 200:  # noqa: PLR2004  Not 100 Continue.
            break
    fields = [line.partition(":") for line in lines[1:] if line]
    headers = {name.lower(): value.strip() for name, _, value in fields}
    length = int(headers.get("content-length", "0")) if has_body and status not in _BODILESS else 0
    return Reply(status, headers, await reader.readexactly(length))
