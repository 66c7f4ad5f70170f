"""A response as HTTP/1.1 sends it."""

from __future__ import annotations

from http import HTTPStatus

from serving.protocol.http import Response

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Of what ends an exchange.
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n"
    for status in HTTPStatus
    if status >= HTTPStatus.OK
}
_WITHOUT_BODY = frozenset({204, 304})


def has_body(status: int) -> bool:
    """Whether a response with that status may have one; RFC 9110, section 6.4.1."""
    return status not in _WITHOUT_BODY


def encode_head(response: Response, extra: str) -> bytes:
    """Status line and headers, `content-length` among them, and the empty line.

    Args:
        response: what is sent.
        extra: whole lines of further headers.

    Raises:
        ValueError: the status is none that ends an exchange, or a header holds what would end its line.
    """
    line = _STATUS_LINES.get(response.status)
    if line is None:
        raise ValueError(f"no such status: {response.status}")
    headers = response.headers
    text = "".join([f"{name}: {value}\r\n" for name, value in headers])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        raise ValueError("a header of the response holds a line break")
    length = f"content-length: {len(response.body)}\r\n" if has_body(response.status) else ""
    return f"{line}{text}{extra}{length}\r\n".encode("latin-1")
