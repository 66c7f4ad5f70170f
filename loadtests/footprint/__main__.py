"""Memory and start-up against their bounds: `make footprint`.

- The gateway holds at most 3 times the bytes in flight: growth of its resident memory under concurrent
  large requests, over the bodies that were sent and not answered yet.
- A tier holds at most its model and two batches: growth of its resident memory from ready to saturated, over
  twice the bytes of a full batch's inputs and outputs. For the sentence encoder the growth is shown too;
  there it is mostly activations, which the bound does not know.
- `halftone serve` is ready within 30 s, the models' load included.

Prints figures and ratios to the bounds (above 1: missed), and writes them to
`loadtests/results/footprint-<date>.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from loadtests.footprint import processes
from loadtests.footprint.wide_model import VALUES
from loadtests.open_loop import Exchange, Mix, Outcome, send_all
from loadtests.open_loop.inference import mix_for
from loadtests.result_file import conditions, keep
from loadtests.server_process import ROOT, halftone

MAX_GATEWAY_RATIO, MAX_BATCHES, MAX_READY_S = 3.0, 2.0, 30.0
ROW_BYTES, BATCH_ROWS = 4 * VALUES, 4
MIB = 2**20
_TENSOR = f"dtype: FP32, shape: [-1, {VALUES}]"
WIDE = f"""
models:
  - name: wide
    source: loadtests.footprint.wide_model:build
    inputs: [{{name: x, {_TENSOR}}}]
    outputs: [{{name: y, {_TENSOR}, kind: regression}}]
    tiers: {{fp32: {{batching: {{max_rows: {BATCH_ROWS}}}, max_queue_rows: 4096}}}}
"""
TEXT = "models: [{name: text, source: 'serving.models.minilm:MiniLM', tiers: {fp32: {}}}]\n"


class Server:
    """A running server whose gateway and tier are known."""

    def __init__(self, url: str, pid: int, ready_s: float) -> None:
        self.url, self.ready_s = url, ready_s
        self.gateway, self.tier = (self._process(pid, name) for name in ("gateway", "fp32"))

    @staticmethod
    def _process(pid: int, name: str) -> int:
        found = [one for one in processes.find(pid, "ServeReplica") if name in processes.command_line(one)]
        if len(found) != 1:
            raise RuntimeError(f"{len(found)} processes look like {name}, not 1")
        return found[0]


def with_server(config: str, measure: Callable[[Server], dict[str, Any]]) -> dict[str, Any]:
    """Start a server, measure, stop it."""
    with tempfile.TemporaryDirectory(prefix="hf", dir="/tmp") as name:
        path = Path(name) / "config.yaml"
        path.write_text(config)
        started_s = time.monotonic()
        environment = {"TMPDIR": name, "PYTHONPATH": str(ROOT)}
        with halftone(path, Path(name) / "log", environment) as (url, pid):
            ready_s = time.monotonic() - started_s
            return {"ready_s": round(ready_s, 1), **measure(Server(url, pid, ready_s))}


def load(server: Server, mix: Mix, requests: int) -> Outcome:
    """So many requests, all due at once."""
    due_s, random = np.zeros(requests), np.random.default_rng(0)
    found = uvloop.run(send_all(server.url, mix, due_s, random, connections=requests, drain_s=60.0))
    if not found.is_success.all():
        raise RuntimeError(f"requests failed: {found.summary()['failures']}")
    return found


def wide(requests: int, request_mib: int) -> Callable[[Server], dict[str, Any]]:
    """Large requests: the gateway's memory and, since the model holds nothing, the tier's."""
    rows = request_mib * MIB // ROW_BYTES

    def measure(server: Server) -> dict[str, Any]:
        mix = mix_for(server.url, "wide", {"fp32": 1.0}, {rows: 1.0}, {"binary": 1.0})
        load(server, mix, 1)  # First use allocates what stays.
        idle = {name: processes.resident_bytes(pid) for name, pid in roles(server)}
        for _, pid in roles(server):
            processes.reset_peak(pid)
        in_flight = asyncio.run(most_in_flight(server.url, mix.exchanges[0], requests))
        growth = {name: processes.peak_bytes(pid) - idle[name] for name, pid in roles(server)}
        batch_bytes = 2 * BATCH_ROWS * ROW_BYTES
        return {
            "requests": requests,
            "request_mib": request_mib,
            "in_flight_mib": in_flight // MIB,
            "idle_mib": {name: size // MIB for name, size in idle.items()},
            "growth_mib": {name: size // MIB for name, size in growth.items()},
            "gateway_growth/in_flight": round(growth["gateway"] / in_flight, 2),
            "gateway/bound": round(growth["gateway"] / in_flight / MAX_GATEWAY_RATIO, 3),
            "tier_growth/batch": round(growth["tier"] / batch_bytes, 2),
            "tier/bound": round(growth["tier"] / batch_bytes / MAX_BATCHES, 3),
        }

    return measure


async def most_in_flight(url: str, exchange: Exchange, requests: int) -> int:
    """Send that many at once, read the answers; the most bytes of bodies sent and not yet answered."""
    host, port = url.removeprefix("http://").split(":")
    flying, most = 0, 0

    async def one() -> None:
        nonlocal flying, most
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(exchange.wire)
            await writer.drain()
            flying += len(exchange.wire)
            most = max(most, flying)
            head = await reader.readuntil(b"\r\n\r\n")
            flying -= len(exchange.wire)
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"a request failed: {head[:200]!r}")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            while length > 0:
                length -= len(await reader.read(min(length, MIB)))
        finally:
            writer.close()

    await asyncio.gather(*(one() for _ in range(requests)))
    return most


def text(server: Server) -> dict[str, Any]:
    """The sentence encoder from ready to saturated."""
    idle = {name: processes.resident_bytes(pid) for name, pid in roles(server)}
    mix = mix_for(server.url, "text", {"fp32": 1.0}, {16: 1.0}, {"binary": 1.0})
    load(server, mix, 48)
    return {
        "ready/bound": round(server.ready_s / MAX_READY_S, 3),
        "idle_mib": {name: size // MIB for name, size in idle.items()},
        "growth_mib": {name: (processes.peak_bytes(pid) - idle[name]) // MIB for name, pid in roles(server)},
    }


def roles(server: Server) -> tuple[tuple[str, int], tuple[str, int]]:
    """The two processes of interest."""
    return ("gateway", server.gateway), ("tier", server.tier)


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.footprint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=32, help="large ones at once (default 32)")
    parser.add_argument("--mib", type=int, default=16, help="of each (default 16)")
    options = parser.parse_args()
    document = {
        **conditions(),
        "wide": with_server(WIDE, wide(options.requests, options.mib)),
        "text": with_server(TEXT, text),
    }
    keep("footprint", document)
    print(json.dumps(document, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
