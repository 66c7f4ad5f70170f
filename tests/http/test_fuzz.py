"""Requests that no careful client sends, over real sockets: those of the corpus, and some new ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, ready_server

from loadtests.fuzz.__main__ import CONFIG, ROOT, fuzz, still_well
from loadtests.fuzz.client import Client, Reply
from loadtests.fuzz.message import Message
from loadtests.fuzz.mutations import Sent
from loadtests.fuzz.verdict import fault
from loadtests.growth import Watch

CORPUS = sorted((ROOT / "tests" / "fuzz" / "corpus").glob("*.http"))
#: New ones for each run of the tests; the seed is fixed, so that they are the same each time.
REQUESTS = 3000
#: Names of entries whose answer is not a matter of its bytes alone.
OTHERS = {"several", "closed", "raw"}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two models with inputs of every kind."""
    config = CONFIG.read_text(encoding="utf-8")
    environment = {"PYTHONPATH": str(ROOT)}
    with ready_server(tmp_path_factory.mktemp("fuzzed"), config, environment) as process:
        yield process


def told(reply: Reply) -> str:
    """As files of the corpus are named."""
    if reply.status < 400:
        return "ok"
    return str(json.loads(reply.body)["code"]) if reply.body else f"bare{reply.status}"


async def replay(address: tuple[str, int], entry: Path, wire: bytes) -> None:
    """One entry on a connection of its own."""
    try:
        message = Message.parse(wire)
    except ValueError:
        message = None
    sent = Sent(wire, is_framed=False, message=message)
    replies = await Client(*address).exchange(sent)
    for reply in replies:
        assert fault(sent, reply) is None, entry.name
    expected = entry.stem.partition("-")[0]
    if expected not in OTHERS:
        assert [told(reply) for reply in replies] == [expected], entry.name


def test_the_corpus_is_answered_as_before(fuzzed: ServerProcess) -> None:
    """Every entry; its file's name says how."""
    wires = {entry: entry.read_bytes() for entry in CORPUS}

    async def replay_all() -> None:
        slots = asyncio.Semaphore(16)

        async def one(entry: Path) -> None:
            async with slots:
                await replay(fuzzed.address, entry, wires[entry])

        await asyncio.gather(*(one(entry) for entry in CORPUS))

    asyncio.run(replay_all())
    assert len(CORPUS) > 100


def test_mutated_requests_do_no_harm(fuzzed: ServerProcess) -> None:
    """No answer but documented ones, no series that a client named, and good requests succeed after them."""
    url = f"http://127.0.0.1:{fuzzed.port}"
    found = asyncio.run(fuzz(url, range(REQUESTS), seed=7))
    assert found.faults == {}
    assert sum(found.answers.values()) >= REQUESTS
    assert {"200", "400", "404", "405", "413", "415", "431"} <= found.answers.keys()
    assert still_well(url) == []
    series = Watch(url, fuzzed.process.pid, fuzzed.temporary).look().series
    assert not [name for name in series if "fuzz" in name or "nobody" in name]
