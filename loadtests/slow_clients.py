"""What slow clients cost the others: `python -m loadtests.slow_clients`.

One server with the echo model is asked at a steady rate, by turns without slow clients and beside many
that send a request's headers, send its body, or read its reply at 1 byte a second, and connect anew as
soon as the server has enough of them. The slow ones run in a process of their own.

Prints, per kind, the callers' p99 over that without slow clients (from when each request was due; bound:
1.5), and the longest that a slow connection was held (bound: about 10 s). Results go to
`loadtests/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import numpy as np
import uvloop

from loadtests.open_loop import Mix, send_all
from loadtests.open_loop.arrivals import FloatArray, arrivals
from loadtests.open_loop.inference import mix_for
from loadtests.result_file import conditions, keep
from loadtests.server_process import ROOT, halftone

Kind = Literal["headers", "bodies", "readers"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Ten seconds, and what the slow clients' own clock is coarse by.
MAX_HELD_S = 12.0
PATH = "/v2/models/echo/infer"
ROWS = 64
CONFIG = """
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp32: {}}
    divergence: {sample: 0}
"""
#: A slow reader's buffer: its reply, 64 rows, is larger, so that most of it stays with the server.
READ_BUFFER_BYTES = 4096
_TICK_S = 1.0
_ESTABLISHED = "01"


class SlowClients:
    """Clients of one kind, each of which connects anew when its connection has ended."""

    def __init__(self, port: int, kind: Kind, count: int) -> None:
        """`port`: the server's, on loopback."""
        self._port = port
        self._kind = kind
        self._count = count
        self._open_ports: frozenset[int] = frozenset()
        #: Seconds for which the server kept each connection, to within a tick; at the end, so far.
        self.held_s: list[float] = []

    async def run(self, duration_s: float) -> None:
        """Keep at it for that long."""
        # Spread over a tick: so many clients of a moment's difference are no burst.
        starts_s = [_TICK_S * number / self._count for number in range(self._count)]
        clients = [asyncio.create_task(self._connect_again_and_again(start_s)) for start_s in starts_s]
        watch = asyncio.create_task(self._watch())
        await asyncio.sleep(duration_s)
        for task in (*clients, watch):
            task.cancel()
        await asyncio.wait((*clients, watch))

    async def _connect_again_and_again(self, start_s: float) -> None:
        await asyncio.sleep(start_s)
        while True:
            with socket.socket() as connection:
                connection.setblocking(False)
                if self._kind == "readers":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BUFFER_BYTES)
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
                began_s = time.monotonic()
                try:
                    with suppress(OSError):  # The server has had enough.
                        await self._dawdle(connection)
                finally:
                    self.held_s.append(time.monotonic() - began_s)

    async def _dawdle(self, connection: socket.socket) -> None:
        """Until the server's end is closed. A reader would not notice by what it reads."""
        own_port = connection.getsockname()[1]
        await asyncio.get_running_loop().sock_sendall(connection, _OPENINGS[self._kind])
        await asyncio.sleep(_TICK_S)
        while own_port in self._open_ports:
            with suppress(BlockingIOError):
                if self._kind == "readers":
                    connection.recv(1)
                else:
                    connection.send(b"1")
            await asyncio.sleep(_TICK_S)

    async def _watch(self) -> None:
        while True:
            self._open_ports = open_peers(self._port)
            await asyncio.sleep(_TICK_S / 4)


def open_peers(port: int) -> frozenset[int]:
    """The peers' ports of the established IPv4 connections of a local port."""
    found = []
    for line in Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]:
        _, local, peer, state, *_ = line.split()
        if state == _ESTABLISHED and int(local.partition(":")[2], 16) == port:
            found.append(int(peer.partition(":")[2], 16))
    return frozenset(found)


def _reader_opening() -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [ROWS, 128], "data": [0.5] * (ROWS * 128)}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: slow\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


_OPENINGS: dict[Kind, bytes] = {
    "headers": f"POST {PATH} HTTP/1.1\r\nhost: slow\r\nx-slow: ".encode(),
    "bodies": f"POST {PATH} HTTP/1.1\r\nhost: slow\r\ncontent-length: 100000\r\n\r\n".encode(),
    "readers": _reader_opening(),
}


def _attack(port: int, kind: Kind, count: int, duration_s: float) -> None:
    """The slow clients' process: prints the longest that a connection was held."""
    clients = SlowClients(port, kind, count)
    asyncio.run(clients.run(duration_s))
    print(max(clients.held_s))


def _measure(url: str, mix: Mix, due_s: FloatArray, kind: Kind | None, count: int) -> tuple[Any, float]:
    """The callers' outcome beside that kind of slow clients, and how long those were held in seconds."""
    duration_s = float(due_s[-1])
    command = [sys.executable, "-m", "loadtests.slow_clients", "--attack", str(kind)]
    command += ["--count", str(count if kind else 0), "--port", str(urlsplit(url).port)]
    # The first of them have been turned out once when the callers begin.
    lead_s = MAX_HELD_S if kind else 0.0
    command += ["--seconds", str(lead_s + duration_s + 1)]
    attack = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) if kind else None
    time.sleep(lead_s)
    outcome = uvloop.run(send_all(url, mix, due_s, np.random.default_rng(0), connections=32, drain_s=10.0))
    held_s = float(attack.communicate()[0]) if attack else 0.0
    return outcome, held_s


def _run(options: argparse.Namespace) -> dict[str, Any]:
    kinds: list[Kind | None] = [None, *KINDS]
    latencies_s: dict[Kind | None, list[FloatArray]] = {kind: [] for kind in kinds}
    held_s: dict[Kind | None, float] = dict.fromkeys(kinds, 0.0)
    with tempfile.TemporaryDirectory(prefix="hf", dir="/tmp") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        with halftone(config, Path(folder) / "log", {"TMPDIR": folder}) as (url, _):
            mix = mix_for(url, "echo", {"fp32": 1.0}, {1: 1.0}, {"binary": 1.0})
            random = np.random.default_rng(0)
            _measure(url, mix, arrivals(options.rate, 2.0, random), None, 0)  # Warm.
            for turn in range(options.rounds):
                due_s = arrivals(options.rate, options.seconds, random)
                for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                    outcome, longest_s = _measure(url, mix, due_s, kind, options.count)
                    if not outcome.is_success.all():
                        raise RuntimeError(f"requests failed: {outcome.summary()['failures']}")
                    latencies_s[kind].append(outcome.latencies_s)
                    held_s[kind] = max(held_s[kind], longest_s)
    return {str(kind or "none"): _summary(latencies_s, kind, held_s[kind]) for kind in kinds}


def _summary(latencies_s: dict[Kind | None, list[FloatArray]], kind: Kind | None, held_s: float) -> Any:
    def p99_ms(rounds: list[FloatArray]) -> float:
        return float(np.percentile(np.concatenate(rounds), 99)) * 1000

    own, quiet = latencies_s[kind], latencies_s[None]
    return {
        "requests": sum(map(len, own)),
        "p50_ms": round(float(np.percentile(np.concatenate(own), 50)) * 1000, 2),
        "p99_ms": round(p99_ms(own), 2),
        "p99/quiet": round(p99_ms(own) / p99_ms(quiet), 3),
        "p99/quiet_median_of_rounds": round(
            statistics.median(p99_ms([a]) / p99_ms([b]) for a, b in zip(own, quiet, strict=True)), 3
        ),
        "p99/quiet_by_round": [round(p99_ms([a]) / p99_ms([b]), 2) for a, b in zip(own, quiet, strict=True)],
        "held_s": round(held_s, 1),
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.slow_clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=200, help="slow clients of a kind (default 200)")
    parser.add_argument("--rate", type=float, default=100.0, help="of the other callers, per s (default 100)")
    parser.add_argument("--rounds", type=int, default=4, help="of every kind and none (default 4)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each (default 10)")
    parser.add_argument("--attack", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        _attack(options.port, options.attack, options.count, options.seconds)
        return 0
    document = {
        **conditions(),
        "slow_clients": options.count,
        "rate_per_s": options.rate,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "kinds": _run(options),
        "load_average_after": os.getloadavg(),
    }
    keep("slow-clients", document)
    print(json.dumps(document, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
