"""HTTP messages: headers and the one body of every error."""

import json
from typing import Any

import pytest

from serving.errors import BadHeader, BadShape, Overloaded
from serving.protocol.http import Headers, Request, Response, error_body


def test_names_are_case_insensitive_and_values_kept_in_order() -> None:
    """A repeated header is visible as such, so that it can be refused."""
    headers = Headers([("X-Precision", "fp16"), ("Accept", "*/*"), ("x-precision", "fp32")])
    assert headers.get("X-PRECISION") == "fp16"
    assert headers.get_all("x-precision") == ["fp16", "fp32"]
    assert headers.items() == [("x-precision", "fp16"), ("x-precision", "fp32"), ("accept", "*/*")]
    assert len(headers) == 2
    assert "Accept" in headers


def test_a_header_that_may_be_given_once_is_refused_when_repeated() -> None:
    """Even with the same value."""
    headers = Headers([("Content-Type", "a"), ("content-type", "a"), ("accept", "b")])
    assert headers.only("Accept") == "b"
    assert headers.only("x-other") is None
    with pytest.raises(BadHeader, match=r"^Content-Type is given 2 times"):
        headers.only("content-type")


def test_absent_headers_are_none_and_empty() -> None:
    """Absent differs from empty."""
    headers = Headers([("x", "")])
    assert headers.get("x") == ""
    assert headers.get("y") is None
    assert headers.get_all("y") == []
    assert 1 not in headers


def test_the_callers_list_of_values_is_a_copy() -> None:
    """Changing what `get_all` returned changes nothing."""
    headers = Headers([("x", "1")])
    headers.get_all("x").append("2")
    assert headers.get_all("x") == ["1"]


def test_repr_shows_no_values() -> None:
    """A logged request must not show its token."""
    assert "secret" not in repr(Headers([("authorization", "Bearer secret")]))


def test_messages_have_defaults_of_their_own() -> None:
    """Two requests don't share their headers."""
    assert Request("GET", "/").headers is not Request("GET", "/").headers
    assert Response(200).headers is not Response(200).headers


@pytest.mark.parametrize("error", [BadShape("shape [2] é"), Overloaded("full", 3)])
def test_error_body(error: Any) -> None:
    """The sentence, the code and the id, and nothing else."""
    assert json.loads(error_body(error, "r-1")) == {"error": str(error), "code": error.code, "id": "r-1"}


def test_error_body_survives_text_that_is_no_unicode() -> None:
    """Even a careless message becomes JSON."""
    assert json.loads(error_body(BadShape("\ud800"), "\udfff"))["code"] == "bad_shape"


def test_what_is_found_in_headers_is_looked_for_once() -> None:
    """None included; what is raised is raised again."""
    asked: list[str] = []

    def find(headers: Headers) -> str | None:
        asked.append("find")
        return headers.get("x-b")

    def fail(headers: Headers) -> str | None:
        asked.append("fail")
        return headers.only("x-a")

    headers = Headers([("X-A", "1"), ("x-a", "2")])
    assert (headers.once(find), headers.once(find)) == (None, None)
    for _ in range(2):
        with pytest.raises(BadHeader):
            headers.once(fail)
    assert asked == ["find", "fail", "fail"]
