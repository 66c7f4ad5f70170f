"""Tokens that change while the server runs: what is taken over, when, and what a mistake costs."""

import asyncio
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.gateway import token_watch
from serving.gateway.token_watch import TokenWatch

FIRST = "0123456789abcdef"
SECOND = "fedcba9876543210"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A file with one token."""
    file = tmp_path / "tokens"
    file.write_text(f"alice {FIRST}\n")
    return file


def accepted(watch: TokenWatch) -> set[str]:
    """Which of the two tokens get in."""
    return {token for token in (FIRST, SECOND) if watch.authenticator.accepts([f"Bearer {token}"])}


def settled(watch: TokenWatch) -> None:
    """Two looks: one sees the change, the next that it is over."""
    watch.look()
    watch.look()


def test_a_watch_starts_with_what_the_file_holds(tokens: Path) -> None:
    """And refuses a wrong one, as at the start of the server."""
    assert accepted(TokenWatch(tokens)) == {FIRST}
    tokens.write_text("alice\n")
    with pytest.raises(ConfigError):
        TokenWatch(tokens)


def test_a_changed_file_is_taken_over(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Added and removed tokens alike; the log says so, and shows none."""
    watch = TokenWatch(tokens)
    with caplog.at_level(logging.INFO, "halftone.gateway"):
        tokens.write_text(f"alice {FIRST}\nbob {SECOND}\n")
        settled(watch)
        assert accepted(watch) == {FIRST, SECOND}
        tokens.write_text(f"bob {SECOND}\n")
        settled(watch)
    assert accepted(watch) == {SECOND}
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert FIRST not in caplog.text
    assert SECOND not in caplog.text


def test_a_file_that_is_replaced_is_noticed(tokens: Path) -> None:
    """By a rename, size and time of change the same; through a symbolic link, as Kubernetes does it."""
    link = tokens.with_name("link")
    link.symlink_to(tokens)
    watches = TokenWatch(tokens), TokenWatch(link)
    other = tokens.with_name("other")
    other.write_text(f"alice {SECOND}\n")
    status = tokens.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(tokens)
    for watch in watches:
        settled(watch)
        assert accepted(watch) == {SECOND}


def test_a_file_that_is_being_written_waits(tokens: Path) -> None:
    """Half a token is a shorter one: nothing is read before the file has stood still."""
    watch = TokenWatch(tokens)
    for written in range(len(SECOND), len(SECOND) + 3):
        tokens.write_text(f"alice {SECOND}0123"[: len("alice ") + written])
        watch.look()
        assert accepted(watch) == {FIRST}
    tokens.write_text(f"alice {SECOND}\n")
    settled(watch)
    assert accepted(watch) == {SECOND}


@pytest.mark.parametrize("content", ["alice\n", "", "alice short\n", None])
def test_a_wrong_file_keeps_the_tokens_before_it(
    tokens: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    """One line says why, however often it is looked at; mended, the file counts again."""
    watch = TokenWatch(tokens)
    if content is None:
        tokens.unlink()
    else:
        tokens.write_text(content)
    for _ in range(5):
        watch.look()
    assert accepted(watch) == {FIRST}
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "the tokens before stay valid" in record.getMessage()
    assert "server.tokens_file" in record.getMessage()
    assert "short" not in record.getMessage().replace("shorter", "")
    tokens.write_text(f"bob {SECOND}\n")
    settled(watch)
    assert accepted(watch) == {SECOND}


@given(st.lists(st.sampled_from([FIRST, SECOND, "bad", "look"]), max_size=12))
def test_only_tokens_that_stood_in_the_file_get_in(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    """Whatever happens to it; and after two looks at a good file, exactly its own."""
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(f"alice {FIRST}\n")
    watch, stood = TokenWatch(file), {FIRST}
    for step in steps:
        if step == "look":
            watch.look()
        else:
            file.write_text(f"alice {step}\n")
            stood |= {step}
        found = accepted(watch)
        assert len(found) == 1
        assert found <= stood
    file.write_text(f"carol {SECOND}\n\n")
    settled(watch)
    assert accepted(watch) == {SECOND}


def test_it_looks_until_it_is_cancelled(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own."""
    monkeypatch.setattr(token_watch, "LOOK_INTERVAL_S", 0.01)

    watch = TokenWatch(tokens)
    tokens.write_text(f"bob {SECOND}\n")

    async def scenario() -> None:
        running = asyncio.create_task(watch.run())
        async with asyncio.timeout(5):
            while accepted(watch) != {SECOND}:  # noqa: ASYNC110  The file is what changes.
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()

    asyncio.run(scenario())
