"""Send a server of its own 100,000 requests that no careful client sends: `make fuzz`.

    python -m loadtests.fuzz --requests 100000 --seed 1

Each is a good one with up to three parts spoiled: JSON, tensors, headers, path, method, chunks, compression,
or bytes of the wire. Fails (exit status 1) on an answer with 5xx, but for a deadline that the request set
itself; on an error of another shape than documented, on silence, on a sensitive request that a less precise
tier answered; and on growth of a process's memory, descriptors, threads or tasks, or of the number of metric
series. A request with a finding is written to `build/fuzz/NUMBER.http`; `--only NUMBER` sends it again. Once
mended, it belongs into `tests/fuzz/corpus`. Writes its result to `loadtests/results/fuzz-<date>.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from loadtests.fuzz.client import Client, NoAnswer
from loadtests.fuzz.mutations import JSON_LENGTH, Sent, mutated, parts_of
from loadtests.fuzz.seeds import ECHO_PATH, TYPED_PATH, seeds
from loadtests.fuzz.verdict import fault
from loadtests.growth import Watch, grown
from loadtests.result_file import conditions, keep
from loadtests.server_process import ROOT, halftone
from serving.protocol.oip import MAX_CACHED_HEADS

FINDINGS = ROOT / "build" / "fuzz"
CONFIG = ROOT / "loadtests" / "fuzz" / "server.yaml"
#: By when every status and reason that there is should have been seen once.
WARMUP_SHARE = 0.5
_CONNECTIONS = 32


@dataclass(slots=True)
class Found:
    """What became of the requests."""

    answers: Counter[str] = field(default_factory=Counter)
    #: Number of the request -> what was wrong with its answer.
    faults: dict[int, str] = field(default_factory=dict)


async def fuzz(url: str, numbers: Iterable[int], seed: int, connections: int = _CONNECTIONS) -> Found:
    """Send the requests of these numbers."""
    parts = urlsplit(url)
    beginnings, found, waiting = seeds(), Found(), iter(numbers)

    async def work() -> None:
        client = Client(parts.hostname or "127.0.0.1", parts.port or 80)
        for number in waiting:
            sent = mutated(number, seed, beginnings)
            problem = await judged(client, sent, found.answers)
            if problem is not None:
                found.faults[number] = problem
        await client.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    return found


async def judged(client: Client, sent: Sent, answers: Counter[str]) -> str | None:
    """What is wrong with the answers to one request; they are counted."""
    try:
        replies = await client.exchange(sent)
    except NoAnswer as error:
        return f"no answer: {error}"
    except OSError as error:
        return f"no connection: {error!r}"
    if not replies:
        answers["closed"] += 1
    for reply in replies:
        answers[str(reply.status)] += 1
        problem = fault(sent, reply)
        if problem is not None:
            return problem
    return None


def fill_caches(url: str) -> None:
    """Good requests with as many heads as a gateway remembers: what is bounded is full from the start."""
    good = [message for message in seeds() if message.header(JSON_LENGTH) is not None]
    beginnings = [next(one for one in good if one.target == path) for path in (ECHO_PATH, TYPED_PATH)]

    async def fill() -> None:
        parts = urlsplit(url)
        client = Client(parts.hostname or "127.0.0.1", parts.port or 80)
        for number in range(MAX_CACHED_HEADS):
            for message in beginnings:
                text, tail = parts_of(message)
                named = text.replace(b"{", b'{"id": "fill-%d", ' % number, 1)
                whole = replace(message.with_header(JSON_LENGTH, b"%d" % len(named)), body=named + tail)
                [reply] = await client.exchange(Sent(whole.wire(), True, whole))
                if reply.status != 200:  # noqa: PLR2004
                    raise RuntimeError(f"a good request failed: {reply}")
        await client.close()

    asyncio.run(fill())


def still_well(url: str) -> list[str]:
    """Which good requests fail afterwards."""

    async def ask() -> list[str]:
        parts = urlsplit(url)
        client = Client(parts.hostname or "127.0.0.1", parts.port or 80)
        problems = []
        for message in seeds():
            [reply] = await client.exchange(Sent(message.wire(), True, message))
            if reply.status != 200:  # noqa: PLR2004
                problems.append(f"{message.target.decode()}: {reply.status} {reply.body[:200]!r}")
        await client.close()
        return problems

    return asyncio.run(ask())


def report(found: Found, watch: Watch, warmup_s: float, well: list[str]) -> dict[str, Any]:
    """Answers, faults, growth, and whether all is as it should be."""
    growth, problems = grown(watch, warmup_s)
    problems += [*well, *(f"request {number}: {text}" for number, text in sorted(found.faults.items()))]
    return {"answers": dict(sorted(found.answers.items())), **growth, "problems": problems}


def main() -> int:
    """Fuzz, report. Returns 0 where nothing was found."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=100_000, help="(default 100000)")
    parser.add_argument("--seed", type=int, default=0, help="of all requests (default 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one request, and its answer")
    options = parser.parse_args()
    numbers = range(options.requests) if options.only is None else [options.only]
    with tempfile.TemporaryDirectory(prefix="hz", dir="/tmp") as name:
        folder = Path(name)
        environment = {"TMPDIR": name, "PYTHONPATH": str(ROOT)}
        with halftone(CONFIG, folder / "log", environment) as (url, pid):
            fill_caches(url)
            watch, began_s = Watch(url, pid, folder), time.monotonic()
            with watch.running():
                found = uvloop.run(fuzz(url, numbers, options.seed))
            took_s = time.monotonic() - began_s
            found_facts = report(found, watch, WARMUP_SHARE * took_s, still_well(url))
    beginnings = seeds()
    for number in found.faults:
        FINDINGS.mkdir(parents=True, exist_ok=True)
        wire = mutated(number, options.seed, beginnings).wire
        (FINDINGS / f"{number}.http").write_bytes(wire)
    document = {
        **conditions(),
        "requests": len(numbers),
        "seed": options.seed,
        "took_s": round(took_s, 1),
        **found_facts,
    }
    if options.only is None:
        keep("fuzz", document)
    print(json.dumps(document, indent=2))
    return 1 if document["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
