"""Bearer tokens: who gets in, and which token files are refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError, Unauthorized
from serving.gateway.auth import MAX_TOKENS_BYTES, MIN_TOKEN_LENGTH, Authenticator, load_tokens

TOKEN = "0123456789abcdef"  # noqa: S105  A test's.
OTHER = "fedcba9876543210"


def test_without_tokens_everybody_may_call() -> None:
    """On loopback, or where the operator said so."""
    assert Authenticator(None).check([]) is None
    assert Authenticator(None).check(["Bearer whatever"]) is None


@pytest.mark.parametrize(
    "header", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} ", f"Bearer {OTHER}"]
)
def test_a_known_token_gets_in(header: str) -> None:
    """Any of them, by its name; the scheme's case does not count."""
    caller = Authenticator({"alice": TOKEN, "bob": OTHER}).check([header])
    assert caller == ("bob" if OTHER in header else "alice")


def test_replaced_tokens_count_at_once() -> None:
    """A new one gets in, one that is left out does not."""
    authenticator = Authenticator({"alice": TOKEN})
    authenticator.replace({"bob": OTHER})
    assert authenticator.check([f"Bearer {OTHER}"]) == "bob"
    assert not authenticator.accepts([f"Bearer {TOKEN}"])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [TOKEN],
        [f"Basic {TOKEN}"],
        [f"Bearer {TOKEN}x"],
        [f"Bearer {TOKEN[:-1]}"],
        [f"Bearer {TOKEN.upper()}"],
        [f"Bearer {TOKEN} {TOKEN}"],
        [f"Bearer {TOKEN}", f"Bearer {TOKEN}"],
        ["Bearer alice"],
        ["Bearer \ud800"],
        ["Bearer é"],
    ],
)
def test_anything_else_does_not(headers: list[str]) -> None:
    """With the challenge that HTTP wants."""
    with pytest.raises(Unauthorized) as caught:
        Authenticator({"alice": TOKEN}).check(headers)
    assert caught.value.headers == (("www-authenticate", "Bearer"),)


def test_no_token_at_all_lets_nobody_in() -> None:
    """An empty list is not the same as none."""
    with pytest.raises(Unauthorized):
        Authenticator({}).check(["Bearer "])


@given(st.text(st.characters(codec=None)))
def test_no_other_text_gets_in(text: str) -> None:
    """And none is an error of the server's."""
    with pytest.raises(Unauthorized):
        Authenticator({"alice": TOKEN}).check([f"Bearer {text}"])


def test_a_refusal_says_nothing_of_tokens() -> None:
    """Neither the known one nor the one that was tried."""
    with pytest.raises(Unauthorized) as caught:
        Authenticator({"alice": TOKEN}).check(["Bearer guess"])
    assert "guess" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert TOKEN not in repr(vars(Authenticator({"alice": TOKEN})))


def test_a_tokens_file(tmp_path: Path) -> None:
    """A line each; comments and empty lines do not count."""
    file = tmp_path / "tokens"
    file.write_text(f"# who token\n\nalice {TOKEN}\n  bob\t{OTHER}  \n")
    assert load_tokens(file) == {"alice": TOKEN, "bob": OTHER}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"alice {TOKEN}\nbob\n", "line 2: a line is `name token`"),
        (f"alice {TOKEN} now\n", "line 1: a line is"),
        ("alice secret-but-short\n"[:20] + "\n", "at least 16"),
        (f"alice {TOKEN}\nalice {OTHER}\n", "line 2: the name 'alice' stands twice"),
        (f"alice {TOKEN}\nbob {TOKEN}\n", "line 2: another name has the same token"),
        (f"alice {TOKEN}\n" + "#" * MAX_TOKENS_BYTES, "is larger than"),
        ("", "holds no token"),
        ("# nobody\n", "holds no token"),
    ],
)
def test_a_bad_tokens_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """By line and field, without showing a token."""
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load_tokens(file)
    assert caught.value.path == "server.tokens_file"
    assert TOKEN not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_token_has_a_least_length(tmp_path: Path) -> None:
    """One character less is refused."""
    file = tmp_path / "tokens"
    file.write_text(f"alice {'x' * MIN_TOKEN_LENGTH}\n")
    assert load_tokens(file)
    file.write_text(f"alice {'x' * (MIN_TOKEN_LENGTH - 1)}\n")
    with pytest.raises(ConfigError):
        load_tokens(file)


@pytest.mark.parametrize("name", ["gone", ".", "with\0nul"])
def test_a_tokens_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    """As a mistake in the configuration."""
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokens(tmp_path / name)


def test_a_tokens_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """The same."""
    file = tmp_path / "tokens"
    file.write_bytes(b"caf\xe9 0123456789abcdef")
    with pytest.raises(ConfigError, match="cannot read") as caught:
        load_tokens(file)
    assert "xe9" not in str(caught.value)
