"""Request bodies that arrive compressed, inflated to a bounded size."""

from __future__ import annotations

import zlib

from serving.errors import BadJson, TooLarge, UnsupportedMedia, quote

_GZIP_WBITS = 16 + zlib.MAX_WBITS
_ZLIB_WBITS = zlib.MAX_WBITS
_RAW_WBITS = -zlib.MAX_WBITS
#: Output is taken in pieces, so that a short body never costs the whole limit.
_PIECE_BYTES = 1 << 20
#: A gzip member holds at least 18 bytes; without this bound a body of empty members is slow.
_MAX_GZIP_MEMBERS = 1024


def decompress(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """The body without its `Content-Encoding`.

    Args:
        body: The body as received.
        encoding: The value of `Content-Encoding`, or `None`.
        max_bytes: What the result may hold at most.

    Raises:
        TooLarge: The result is larger than `max_bytes`.
        BadJson: The compressed data is corrupt, truncated or followed by something else.
        UnsupportedMedia: The encoding is unknown, or several are stacked.
    """
    name = "identity" if encoding is None else encoding.strip().lower()
    if name == "identity":
        if len(body) > max_bytes:
            raise TooLarge(f"the body is larger than {max_bytes} bytes")
        return body
    if name in ("gzip", "x-gzip"):
        return _inflate(body, _GZIP_WBITS, max_bytes)
    if name == "deflate":
        return _inflate(body, _ZLIB_WBITS if _has_zlib_header(body) else _RAW_WBITS, max_bytes)
    raise UnsupportedMedia(
        f"content encoding {quote(name)} is not served: use one of identity, gzip, deflate"
    )


def _has_zlib_header(body: bytes) -> bool:
    """Whether `deflate` means zlib here (RFC 9110), or the raw stream that some clients send."""
    return len(body) > 1 and body[0] & 0x0F == zlib.DEFLATED and (body[0] << 8 | body[1]) % 31 == 0


def _inflate(body: bytes, wbits: int, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    total_bytes = 0
    rest = body
    for _ in range(_MAX_GZIP_MEMBERS):
        stream = zlib.decompressobj(wbits)
        while not stream.eof:
            piece = _next_piece(stream, rest, max_bytes - total_bytes)
            total_bytes += len(piece)
            pieces.append(piece)
            rest = stream.unconsumed_tail
        rest = stream.unused_data
        if not rest:
            return b"".join(pieces)
        if wbits != _GZIP_WBITS:
            raise BadJson("the compressed body is followed by other data")
    raise BadJson(f"the compressed body has more than {_MAX_GZIP_MEMBERS} gzip members")


def _next_piece(stream: zlib._Decompress, data: bytes, left_bytes: int) -> bytes:
    # One byte beyond the limit tells "too large" from "just fits"; zlib reads 0 as "no limit".
    try:
        piece = stream.decompress(data, min(_PIECE_BYTES, left_bytes + 1))
    except zlib.error:
        raise BadJson("the compressed body is corrupt") from None
    if len(piece) > left_bytes:
        raise TooLarge("the body is larger than the limit once decompressed")
    if not piece and not stream.eof and not stream.unconsumed_tail:
        raise BadJson("the compressed body is truncated")
    return piece
