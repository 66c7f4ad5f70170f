"""Whether the generator can be trusted here: it must show a known stall, and send fast enough.

A server stalls for 1 s of a run of 5 s. Arrivals during the stall wait for its rest, uniformly between
0 and 1 s, so a fifth of all requests are slow and the percentiles are known: p90 is half of the stall,
p99 is 95 % of it. A generator that waits for answers before it sends would have sent one request per
connection during the stall, and would report a p99 of milliseconds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvloop

from loadtests.open_loop.arrivals import arrivals
from loadtests.open_loop.exchange import Exchange, Mix
from loadtests.open_loop.generator import send_all

STALL_S, STALL_AFTER_S, DURATION_S = 1.0, 2.0, 5.0
STALL_RATE_PER_S, FAST_RATE_PER_S = 300.0, 2000.0
#: Of the expected percentiles.
TOLERANCE = 0.15


def self_test() -> bool:
    """Print both findings; whether they are as they should be."""
    with server(STALL_AFTER_S, STALL_S) as url:
        found = measure(url, STALL_RATE_PER_S, DURATION_S, connections=512)
    latency_ms = found["latency_ms"]
    stalled = STALL_S / DURATION_S  # Share of requests that meet the stall.
    expected = {name: STALL_S * 1000 * (1 - share / stalled) for name, share in (("p90", 0.1), ("p99", 0.01))}
    shows = all(abs(latency_ms[name] / value - 1) <= TOLERANCE for name, value in expected.items())
    print(
        f"a stall of {STALL_S * 1000:.0f} ms in {DURATION_S:.0f} s: expected p90 {expected['p90']:.0f} ms, "
    )
    print(f"  p99 {expected['p99']:.0f} ms; measured {latency_ms}: {'shown' if shows else 'NOT SHOWN'}")
    with server(3600, 0) as url:
        found = measure(url, FAST_RATE_PER_S, 3.0, connections=64)
    fast = found["kept_up"] and found["succeeded"] == found["requests"]
    print(f"{FAST_RATE_PER_S:.0f} requests/s: {found}: {'kept up' if fast else 'NOT KEPT UP'}")
    return bool(shows and fast)


def measure(url: str, rate_per_s: float, duration_s: float, connections: int) -> dict[str, Any]:
    """One run of small requests."""
    random = np.random.default_rng(0)
    mix = Mix((Exchange.post(url, b"x" * 512, {}),))
    due_s = arrivals(rate_per_s, duration_s, random)
    return uvloop.run(send_all(url, mix, due_s, random, connections=connections)).summary()


@contextmanager
def server(stall_after_s: float, stall_s: float) -> Iterator[str]:
    """A stalling server of its own process; its URL."""
    command = [
        sys.executable, "-m", "loadtests.open_loop.stalling_server", str(stall_after_s), str(stall_s)
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip() if process.stdout else ""
            yield f"http://127.0.0.1:{int(port)}/"
        finally:
            process.kill()
