"""The error tree: one class, one status, one code; errors travel between processes; text is quoted."""

import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import errors
from serving.errors import (
    ConfigError,
    HalftoneError,
    MethodNotAllowed,
    ModelError,
    NonfiniteOutput,
    NotReady,
    Overloaded,
    RequestError,
    TierLost,
    quote,
)

#: Those of the tree; other modules may add their own once they are imported.
KINDS = [kind for kind in RequestError.__subclasses__() if kind.__module__ == errors.__name__]


def transported(error: Exception) -> Any:
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(error))  # noqa: S301  Our own.


def one(kind: type[RequestError]) -> RequestError:
    """An instance."""
    if kind is MethodNotAllowed:
        return MethodNotAllowed("it failed", "GET")
    if kind is Overloaded:
        return Overloaded("it failed", 7)
    return kind("it failed")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_in_the_docstring_names_every_error_with_its_status(kind: type[RequestError]) -> None:
    """The drawing is the table that clients' authors read."""
    lines = [line for line in (errors.__doc__ or "").splitlines() if re.search(rf"─ {kind.__name__}\b", line)]
    assert len(lines) == 1
    # "404" stands alone where the name says all.
    assert re.search(rf"{kind.__name__} +{kind.status}\b", lines[0])


def test_the_tree_names_no_error_that_is_not_there() -> None:
    """A removed class leaves the drawing too."""
    drawn = set(re.findall(r"─ (\w+)", errors.__doc__ or "")) - {"ConfigError", "RequestError"}
    assert drawn == {kind.__name__ for kind in KINDS}


def test_codes_are_unique_slugs() -> None:
    """A client can tell errors apart by `code` alone."""
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)


@pytest.mark.parametrize("kind", KINDS)
def test_statuses_are_http_errors_and_headers_are_lower_case_pairs(kind: type[RequestError]) -> None:
    """What the class says can be sent as it is."""
    error = one(kind)
    assert 400 <= error.status <= 599
    assert all(name == name.lower() and value.isascii() for name, value in error.headers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_another_instance_that_says_the_same(kind: type[RequestError]) -> None:
    """Type, message and headers, so that Retry-After is not lost."""
    error = one(kind)
    twin = error.copy()
    assert twin is not error
    assert (type(twin), str(twin), twin.headers) == (kind, "it failed", error.headers)
    assert twin.__traceback__ is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_the_way_to_another_process(kind: type[RequestError]) -> None:
    """Tiers return errors, pickled, with their headers."""
    error = one(kind)
    back = transported(error)
    assert (type(back), str(back), back.headers) == (kind, "it failed", error.headers)


@pytest.mark.parametrize("kind", [ModelError, NotReady, NonfiniteOutput, TierLost])
def test_what_tiers_return_pickles_without_its_cause(kind: type[RequestError]) -> None:
    """A model's own exception may be of a class that the gateway cannot import."""
    error = kind("it failed")
    error.__cause__ = ValueError(lambda: None)
    assert transported(error).__cause__ is None


def test_a_config_error_names_its_field() -> None:
    """In the message and apart, also after a pickle."""
    error = ConfigError("is missing", "models[0].name")
    assert str(error) == "models[0].name: is missing"
    assert transported(error).path == "models[0].name"
    assert str(ConfigError("no file")) == "no file"


def test_every_error_is_a_halftone_error() -> None:
    """One base class to catch."""
    assert all(issubclass(kind, HalftoneError) for kind in (*KINDS, ConfigError))


@given(st.text(st.characters(codec=None)), st.integers(8, 80))
def test_quoted_text_is_short_printable_ascii(text: str, limit: int) -> None:
    """No control character, no line break, no escape sequence of a terminal gets through."""
    quoted = quote(text, limit)
    assert quoted.isascii()
    assert quoted.isprintable()
    assert len(quoted) <= limit + 2
    assert quoted[0] == quoted[-1]


@given(st.text(st.sampled_from("abc xyz_-.09"), max_size=64))
def test_short_plain_text_is_quoted_whole(text: str) -> None:
    """Names are readable."""
    assert quote(text) == f"'{text}'"


def test_long_text_ends_with_dots() -> None:
    """A reader sees that something is missing."""
    assert quote("a" * 100, 10) == "'aaaaaaa...'"
