"""Bytes of a connection on one side, complete requests on the other, within limits of size.

Parsing is llhttp's, through httptools, as strict as it comes: what two parsers could read
differently (two lengths, a length beside chunks, bare line feeds) is refused.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from io import BytesIO
from typing import NoReturn
from urllib.parse import unquote

import httptools

from serving.errors import (
    BadRequest,
    HeadTooLarge,
    InternalError,
    Overloaded,
    RequestError,
    TooLarge,
    UrlTooLong,
)
from serving.protocol.body_room import BodyRoom
from serving.protocol.http import UNDECODABLE, Headers, Request
from serving.protocol.known_heads import KnownHead, KnownHeads

#: Request line and headers together.
MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 100
#: Every chunk costs far more than its bytes. At the default limit of 64 MiB this allows chunks of
#: 1 KiB; a body in 1-byte chunks ends here.
MAX_BODY_CHUNKS = 65_536
#: A declared length is reserved up to here. Of a longer body only what has arrived is counted, or a
#: few clients could fill the memory with promises.
MAX_PROMISED_BYTES = 1_048_576
RETRY_AFTER_S = 1

_VERSIONS = ("1.1", "1.0")
_HEAD_END = b"\r\n\r\n"

#: Lower-case names by what was sent: almost all requests send the same few.
_NAMES: dict[bytes, str] = {}
_MAX_NAMES = 1024
_MAX_NAME_BYTES = 64
#: A chunk's size, without extensions, and the ends of its lines.
_CHUNK_BYTES = 24

#: In place of a closed reader's, which is fed nothing any more.
_NO_PARSER = httptools.HttpRequestParser(object())

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Of one request."""

    max_body_bytes: int
    max_body_chunks: int = MAX_BODY_CHUNKS
    max_head_bytes: int = MAX_HEAD_BYTES
    max_headers: int = MAX_HEADERS


@dataclass(slots=True)
class ReadRequest:
    """A complete request, and what its connection has to know."""

    request: Request
    #: Taken from the room, to be released once it is answered.
    held_bytes: int
    keeps_alive: bool
    #: Whether its client has to be told that the connection stays open: HTTP/1.0.
    is_old: bool


class _Refused(Exception):
    """Ends the parser's work from within a callback; `RequestReader.error` says why."""


class RequestReader:
    """Reads the requests of one connection, one after another."""

    def __init__(self, limits: ReadLimits, room: BodyRoom, heads: KnownHeads) -> None:
        """Make a reader.

        Args:
            limits: of each request.
            room: where all connections take the memory for their bodies from.
            heads: that were read within the same limits, on all connections.
        """
        self._limits = limits
        self._room = room
        self._heads = heads
        #: Complete ones that nobody has taken yet.
        self.requests: deque[ReadRequest] = deque()
        #: Why nothing more is read, and the headers of the request that it is about, if there are any.
        self.error: RequestError | None = None
        self.error_headers: Headers | None = None
        self._parser = httptools.HttpRequestParser(self)
        #: Those of a request whose upgrade was declined, while the parser reads its head again.
        self._declined: dict[str, list[str]] | None = None
        self._begin()

    def _begin(self) -> None:
        """Wait for a request."""
        #: Whether some of the next one has arrived.
        self.has_begun = False
        self.is_in_body = False
        #: Whether its client sends the body only when it is told to.
        self.wants_continue = False
        self._url = b""
        #: Values by lower-case name.
        self._values: dict[str, list[str]] = {}
        self._headers: Headers | None = None
        self._is_upgrade = False
        #: Its URL and headers as far as they are whole, and what came beside them and the body.
        self._head_bytes = self._head_count = self._rest_bytes = 0
        self._body = b""
        #: For a body in several pieces.
        self._buffer: BytesIO | None = None
        #: None: as many as there are chunks.
        self._declared_bytes: int | None = 0
        self._received_bytes = self._held_bytes = self._chunks = 0

    @property
    def headers(self) -> Headers | None:
        """Of the request whose body is read."""
        return self._headers

    @property
    def missing_bytes(self) -> int:
        """Of a body of declared length, what has not arrived."""
        return (self._declared_bytes or 0) - self._received_bytes if self.is_in_body else 0

    def feed(self, data: bytes) -> None:
        """Take in what has arrived; `requests` and `error` tell what it was."""
        if self.error is not None or (not self.has_begun and self._feed_known(data)):
            return
        is_new, read_before, received_before = not self.has_begun, len(self.requests), self._received_bytes
        try:
            declined = self._parse(data)
            read = len(self.requests) - read_before
            if is_new and read == 1 and not declined:
                self._remember(data)
            # Where a request ended, nobody says how much of the data belongs to the next one.
            if self.has_begun and not read:
                self._check_rest(len(data) - (self._received_bytes - received_before))
        except (httptools.HttpParserError, _Refused) as error:
            if self.error is None:
                self.error = _why(error)
                self._drop_body()

    def _parse(self, data: bytes) -> bool:
        """Have the parser read on. Returns whether an upgrade was offered, and declined."""
        declined = False
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._decline_upgrade()
                declined = True
            else:
                return declined

    def _check_rest(self, size_bytes: int) -> None:
        """Bound what is no body and was told to nobody yet: half a head, an extension, a trailer."""
        self._rest_bytes += size_bytes
        allowed_bytes = self._limits.max_head_bytes + _CHUNK_BYTES * self._chunks
        if self._rest_bytes > allowed_bytes:
            self._refuse(self._head_too_large())

    def _feed_known(self, data: bytes) -> bool:
        """Whether that was one whole request with a known head: then the parser need not see it."""
        body_start = data.find(_HEAD_END) + len(_HEAD_END)
        known = self._heads.get(data[:body_start])
        if known is None or len(data) != body_start + known.body_bytes:
            return False
        try:
            if known.body_bytes:
                self._hold(known.body_bytes)
        except _Refused:
            self.error_headers = known.headers
            return True
        request = Request(known.method, known.path, known.query, known.headers, data[body_start:])
        self.requests.append(ReadRequest(request, self._held_bytes, known.keeps_alive, known.is_old))
        self._held_bytes = 0
        return True

    def _remember(self, data: bytes) -> None:
        """Remember the head of what the parser took for a whole request and nothing else."""
        body_start = data.find(_HEAD_END) + len(_HEAD_END)
        read = self.requests[-1]
        request = read.request
        body_bytes = len(request.body)
        # Chunks would make it longer, and neither would the start of another request fit.
        if len(data) == body_start + body_bytes == body_start + read.held_bytes:
            known = KnownHead(
                request.method,
                request.path,
                request.query,
                request.headers,
                body_bytes,
                read.keeps_alive,
                read.is_old,
            )
            self._heads.put(data[:body_start], known)

    def close(self) -> None:
        """Nobody will ask for what has been read."""
        for read in self.requests:
            self._room.release(read.held_bytes)
        self.requests.clear()
        self._drop_body()
        self._parser = _NO_PARSER  # The own one refers back to this reader.

    # The parser calls the rest.

    def on_message_begin(self) -> None:
        """Its first byte."""
        self.has_begun = True

    def on_url(self, part: bytes) -> None:
        """A piece of the request's target."""
        self._url += part
        self._head_bytes += len(part)
        if len(self._url) >= self._limits.max_head_bytes:
            self._refuse(UrlTooLong(f"the URL is longer than {self._limits.max_head_bytes} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole one."""
        self._head_count += 1
        self._head_bytes += len(name) + len(value) + 4
        self._check_head()
        if self._headers is not None:
            return  # A trailer.
        key = _NAMES.get(name) or _lower(name)
        try:
            text = value.strip(b" \t").decode("ascii")
        except UnicodeDecodeError:
            text = UNDECODABLE
        if key in self._values:
            self._values[key].append(text)
        else:
            self._values[key] = [text]

    def on_headers_complete(self) -> None:
        """The head is there; what follows is a body, the next request or nothing."""
        version = self._parser.get_http_version()
        if version not in _VERSIONS:
            self._refuse(BadRequest("not HTTP/1.1"))
        if self._parser.should_upgrade():
            self._is_upgrade = True
            return
        if self._declined is not None:
            self._values, self._declined = self._declined, None
        self._headers = headers = Headers(values=self._values)
        if len(self._values.get("host", ())) > 1:
            self._refuse(BadRequest("more than one Host"))
        if "transfer-encoding" in self._values:
            if headers.get_all("transfer-encoding") != ["chunked"] or version != "1.1":
                self._refuse(BadRequest("a transfer encoding other than chunked, or not in HTTP/1.1"))
            self._declared_bytes = None
        elif "content-length" in self._values:
            self._declared_bytes = declared_bytes = int(self._values["content-length"][0])
            if declared_bytes > self._limits.max_body_bytes:
                self._refuse(self._too_large())
            if declared_bytes <= MAX_PROMISED_BYTES:
                self._hold(declared_bytes)
        else:
            return
        self.is_in_body = True
        self.wants_continue = version == "1.1" and (headers.get("expect") or "").lower() == "100-continue"

    def on_chunk_header(self) -> None:
        """Of the next chunk."""
        self._chunks += 1
        if self._chunks > self._limits.max_body_chunks:
            self._refuse(TooLarge(f"the body is split into more than {self._limits.max_body_chunks} chunks"))

    def on_body(self, piece: bytes) -> None:
        """Some of it."""
        self._received_bytes += len(piece)
        if self._declared_bytes is None or self._declared_bytes > MAX_PROMISED_BYTES:
            if self._received_bytes > self._limits.max_body_bytes:
                self._refuse(self._too_large())
            self._hold(len(piece))
        if self._received_bytes == len(piece):
            self._body = piece
            return
        # One growing buffer, whose content `getvalue` hands out without a copy.
        if self._buffer is None:
            self._buffer = BytesIO()
            self._buffer.write(self._body)
            self._body = b""
        self._buffer.write(piece)

    def on_message_complete(self) -> None:
        """Nothing is missing."""
        if self._is_upgrade or self._headers is None:
            return
        path, _, query = self._url.partition(b"#")[0].partition(b"?")
        if not path.startswith(b"/"):
            path, query = self._parse_target()
        request = Request(
            self._parser.get_method().decode("ascii"),
            unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii"),
            query.decode("ascii"),
            self._headers,
            self._body if self._buffer is None else self._buffer.getvalue(),
        )
        is_old = self._parser.get_http_version() != "1.1"
        read = ReadRequest(request, self._held_bytes, self._parser.should_keep_alive(), is_old)
        self.requests.append(read)
        self._begin()

    def _parse_target(self) -> tuple[bytes, bytes]:
        """Path and query of a request to a proxy, which names scheme and host as well."""
        if self._url == b"*":
            return b"*", b""
        try:
            parsed = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:
            self._refuse(BadRequest("the request's target is no path"))
        return parsed.path or b"/", parsed.query or b""

    def _decline_upgrade(self) -> None:
        """Go on with HTTP/1.1, as RFC 9110, section 7.8, allows.

        The parser takes what follows for the other protocol. Clients that only offer one send
        their body as if they had not. So another parser reads on, behind the same head without
        the offer.
        """
        method, version, values = self._parser.get_method(), self._parser.get_http_version(), self._values
        if method == b"CONNECT":
            self._refuse(BadRequest("this is no proxy"))
        lines = [method + b" " + self._url + b" HTTP/" + version.encode()]
        for name in ("content-length", "transfer-encoding"):
            lines += [f"{name}: {value}".encode() for value in values.get(name, ())]
        options = {one.strip().lower() for value in values["connection"] for one in value.split(",")}
        lines += [f"connection: {option}".encode() for option in ("close", "keep-alive") if option in options]
        self._parser = httptools.HttpRequestParser(self)
        self._begin()
        self._declined = values
        # Not through `feed`: this head is none that a client has sent.
        self._parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _check_head(self) -> None:
        if self._head_bytes > self._limits.max_head_bytes or self._head_count > self._limits.max_headers:
            self._refuse(self._head_too_large())

    def _head_too_large(self) -> HeadTooLarge:
        limits = f"{self._limits.max_headers} headers, or {self._limits.max_head_bytes} bytes of them"
        return HeadTooLarge(f"more than {limits}")

    def _hold(self, size_bytes: int) -> None:
        if not self._room.take(size_bytes, self._held_bytes):
            self._refuse(
                Overloaded(
                    "the bodies of other requests fill the memory that there is for them", RETRY_AFTER_S
                )
            )
        self._held_bytes += size_bytes

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the body is larger than {self._limits.max_body_bytes} bytes")

    def _refuse(self, error: RequestError) -> NoReturn:
        self.error, self.error_headers = error, self._headers
        self._drop_body()
        raise _Refused

    def _drop_body(self) -> None:
        self._room.release(self._held_bytes)
        self._held_bytes = 0
        self._body, self._buffer = b"", None
        self.is_in_body = False


def _lower(name: bytes) -> str:
    lower = name.decode("ascii").lower()
    if len(_NAMES) < _MAX_NAMES and len(name) <= _MAX_NAME_BYTES:
        _NAMES[name] = lower
    return lower


def _why(error: Exception) -> RequestError:
    """What a client is told whose request the parser does not take."""
    if isinstance(error, httptools.HttpParserCallbackError):
        _log.error("reading a request failed", exc_info=error.__context__)
        return InternalError("internal error")
    return BadRequest(f"not HTTP/1.1: {error}")
