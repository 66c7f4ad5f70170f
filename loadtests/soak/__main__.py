"""Load a server of its own steadily and see whether its processes grow: `make soak MINUTES=10`.

    python -m loadtests.soak --minutes 10 --rate 100

The load is a mix: JSON and binary, one row and many, each way to declare a precision, requests that are
refused with 400, clients that leave before their answer, `/metrics`. Once a second, resident memory,
descriptors and threads of each of Halftone's processes are noted, and the asyncio tasks of its gateways.
After the warm-up a line is fitted to each. Exit status 1 where one rises by more than its bound (8 MiB, 8
descriptors, 4 threads, 16 tasks, however long the run: ten minutes at 100/s find 200 bytes a request, a
night finds 3), where a process came or went, where a reply was not the expected one, or where metric series
were added.

Writes its result to `loadtests/results/soak-<date>.json`, unless the load is not the usual one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop

from loadtests.growth import Watch, grown
from loadtests.open_loop import Exchange, Mix, Outcome, arrivals, send_all
from loadtests.open_loop.inference import mix_for
from loadtests.result_file import conditions, keep
from loadtests.server_process import ROOT, halftone

CONFIG = ROOT / "loadtests" / "soak" / "server.yaml"
PRECISIONS = {"": 1.0, "critical": 2.0, "fp32": 1.0, "fp16": 2.0, "bulk": 2.0}
#: Of the whole run, but no more seconds than that: first uses, pools, allocators.
WARMUP_SHARE, LONGEST_WARMUP_S = 0.25, 180.0
#: Of each request that is no plain inference.
OTHERS_SHARE = 0.02
#: Between two clients that leave before they are answered.
LEAVING_INTERVAL_S = 0.5
#: Labels of requests that are refused with 400.
_BAD = frozenset({"no inputs", "unknown tier"})
_REFUSED = 400


def load_of(url: str) -> Mix:
    """What is sent."""
    main = mix_for(url, "echo", PRECISIONS, {1: 8.0, 4: 3.0, 40: 1.0}, {"binary": 2.0, "json": 1.0})
    infer, host = f"{url}/v2/models/echo/infer", urlsplit(url).netloc
    good = main.exchanges[0].wire
    others = [
        Exchange(f"GET /metrics HTTP/1.1\r\nhost: {host}\r\n\r\n".encode(), label="metrics"),
        Exchange(good.replace(b'"inputs"', b'"inputz"'), label="no inputs"),
        Exchange.post(infer, b"{}", {"x-precision": "fp61"}, label="unknown tier"),
        Exchange(good.replace(b"\r\n", b"\r\nx-precision: rel_l2<=1e-2\r\n", 1), label="tolerance"),
    ]
    weights = main.weights or ()
    return Mix((*main.exchanges, *others), (*weights, *[OTHERS_SHARE * sum(weights)] * len(others)))


@contextmanager
def leaving_clients(url: str, wire: bytes) -> Iterator[None]:
    """Until the block ends, clients that send a request and close at once."""
    over = threading.Event()

    async def leave() -> None:
        parts = urlsplit(url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(wire)
        await writer.drain()
        writer.transport.abort()

    def run() -> None:
        while not over.wait(LEAVING_INTERVAL_S):
            asyncio.run(leave())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def soak(url: str, watch: Watch, rate_per_s: float, duration_s: float) -> Outcome:
    """Load and watch for that long."""
    random = np.random.default_rng(0)
    mix, due_s = load_of(url), arrivals(rate_per_s, duration_s, random)
    with watch.running(), leaving_clients(url, mix.exchanges[0].wire):
        return uvloop.run(send_all(url, mix, due_s, random, connections=128))


def report(outcome: Outcome, watch: Watch, warmup_s: float) -> dict[str, Any]:
    """Replies, growth, and what is wrong."""
    statuses = Counter(outcome.status.tolist())
    growth, problems = grown(watch, warmup_s)
    problems += [
        f"{count} replies {status} to {label}"
        for (label, status), count in outcome.refused.items()
        if not (label in _BAD and status == _REFUSED)
    ]
    if missing := sum(statuses[status] for status in statuses if status <= 0):
        problems.append(f"{missing} requests without a reply")
    if outcome.violations:
        problems.append(f"{outcome.violations} answers less precise than declared")
    return {
        "replies": {str(status): count for status, count in sorted(statuses.items())},
        "latency_ms": outcome.summary()["latency_ms"],
        "samples": len(watch.samples),
        **growth,
        "problems": problems,
    }


def main() -> int:
    """Soak, report. Returns 0 where nothing grew."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="(default 10)")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second (default 100)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="with a model `echo`, watched or not")
    options = parser.parse_args()
    duration_s = 60 * options.minutes
    warmup_s = min(WARMUP_SHARE * duration_s, LONGEST_WARMUP_S)
    with tempfile.TemporaryDirectory(prefix="hs", dir="/tmp") as name:
        folder = Path(name)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with halftone(options.config, folder / "log", {"TMPDIR": name, "PYTHONPATH": path}) as (url, pid):
            watch = Watch(url, pid, folder)
            outcome = soak(url, watch, options.rate, duration_s)
    document = {
        **conditions(),
        "minutes": options.minutes,
        "rate_per_s": options.rate,
        "warmup_s": warmup_s,
        **report(outcome, watch, warmup_s),
    }
    if options.config == CONFIG:
        keep("soak", document)
    print(json.dumps(document, indent=2))
    return 1 if document["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
