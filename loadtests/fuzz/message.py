"""`Message`: an HTTP/1.1 request taken apart, so that each part can be spoiled by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Message:
    """One request.

    Attributes:
        headers: but for those that say where the body ends; names in lower case.
        chunks_bytes: sizes of the body's pieces in turn, where it is sent chunked; the last one repeats.
    """

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""
    chunks_bytes: tuple[int, ...] | None = None

    def wire(self) -> bytes:
        """As it is sent."""
        lines = [b"%s %s HTTP/1.1" % (self.method, self.target)]
        lines += [b"%s: %s" % pair for pair in self.headers]
        if self.chunks_bytes is None:
            lines.append(b"content-length: %d" % len(self.body))
            return b"\r\n".join(lines) + _HEAD_END + self.body
        lines.append(b"transfer-encoding: chunked")
        return b"\r\n".join(lines) + _HEAD_END + self._chunked(self.chunks_bytes)

    def _chunked(self, sizes: tuple[int, ...]) -> bytes:
        pieces, start, number = [], 0, 0
        while start < len(self.body):
            size = sizes[min(number, len(sizes) - 1)]
            piece = self.body[start : start + size]
            pieces.append(b"%x\r\n%s\r\n" % (len(piece), piece))
            start, number = start + size, number + 1
        return b"".join(pieces) + b"0\r\n\r\n"

    def with_header(self, name: bytes, value: bytes | None) -> Message:
        """With this value alone of a header, or without it."""
        kept = tuple(pair for pair in self.headers if pair[0] != name)
        return replace(self, headers=kept if value is None else (*kept, (name, value)))

    def header(self, name: bytes) -> bytes | None:
        """A header's first value."""
        return next((value for found, value in self.headers if found == name), None)

    @classmethod
    def parse(cls, wire: bytes) -> Self:
        """A request with a body of stated length, or of what follows the head.

        Raises:
            ValueError: it has no head.
        """
        head, end, body = wire.partition(_HEAD_END)
        lines = head.split(b"\r\n")
        if not end or lines[0].count(b" ") < 2:  # noqa: PLR2004  Method, target, version.
            raise ValueError("no head of a request")
        method, target, _ = lines[0].split(b" ", 2)
        pairs = [line.partition(b":") for line in lines[1:]]
        headers = [(name.lower(), value.strip(b" \t")) for name, _, value in pairs]
        kept = tuple(pair for pair in headers if pair[0] != b"content-length")
        stated = next((value for name, value in headers if name == b"content-length"), b"")
        return cls(method, target, kept, body[: int(stated)] if stated.isdigit() else body)
