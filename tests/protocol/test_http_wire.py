"""Responses as they are written."""

import http.client
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.protocol.http import Response
from serving.protocol.http_wire import encode_head


@given(
    st.sampled_from([200, 404, 503]),
    st.lists(
        st.tuples(
            st.sampled_from(["x-a", "x-b"]), st.text(st.characters(min_codepoint=33, max_codepoint=126))
        ),
        max_size=3,
    ),
    st.binary(max_size=100),
)
def test_a_response_is_what_a_client_reads(status: int, headers: list[tuple[str, str]], body: bytes) -> None:
    """Written by hand, read by the standard library."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(encode_head(Response(status, headers, body), "connection: close\r\n") + body)
        response = http.client.HTTPResponse(near)
        response.begin()
        assert (response.status, response.read()) == (status, body)
        assert response.getheader("connection") == "close"
        for name in {name for name, _ in headers}:
            assert response.headers.get_all(name) == [value for own, value in headers if own == name]


@pytest.mark.parametrize(
    "header",
    [("x-a", "b\r\nx-c: d"), ("x-a", "b\n"), ("x-a\r", "b"), ("x-a", "b\rc"), ("x-a", "\N{EURO SIGN}")],
)
def test_a_header_cannot_bring_another(header: tuple[str, str]) -> None:
    """Nor text that has no bytes there."""
    with pytest.raises(ValueError):  # noqa: PT011  UnicodeEncodeError, for text.
        encode_head(Response(200, [header]), "")


@pytest.mark.parametrize("status", [0, 99, 100, 101, 299, 9999])
def test_statuses_that_end_no_exchange(status: int) -> None:
    """Or that nobody has defined."""
    with pytest.raises(ValueError, match="no such status"):
        encode_head(Response(status), "")


@pytest.mark.parametrize("status", [204, 304])
def test_no_length_where_there_is_no_body(status: int) -> None:
    """RFC 9110, section 8.6."""
    assert b"content-length" not in encode_head(Response(status), "")
