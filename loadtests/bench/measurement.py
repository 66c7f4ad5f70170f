"""One round of one server: closed loops, then an open loop at a share of what those reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from loadtests.bench.closed_loop import LoadFailed, closed_loop, write_script
from loadtests.bench.contender import CONTENDERS, ask, started
from loadtests.bench.quiet import wait_for_quiet
from loadtests.bench.workload import Array, Headers, Workload
from loadtests.open_loop import Exchange, Mix, arrivals, send_all
from loadtests.server_process import ROOT

CONNECTIONS = (1, 32, 128)
WARMUP_S = 2
OPEN_LOAD = 0.7
#: The open-loop generator shares the cores with the server: beyond this it would be what is measured.
MAX_OPEN_RATE_PER_S = 5000.0
#: Embeddings of other batches differ by FP32's own rounding.
ABSOLUTE_TOLERANCE = 1e-4

Figures = dict[str, Any]


def measure(
    name: str,
    workload: Workload,
    expected: Array,
    *,
    threads: int,
    seconds: int,
    patience_s: float,
    folder: Path,
) -> Figures:
    """Start the server, check an answer, load it.

    Raises:
        StartFailed: it did not become ready.
        LoadFailed: its answer is another one than `expected`, or requests failed.
    """
    dialect = CONTENDERS[name].dialect
    requests = [dialect.encode(workload, row) for row in workload.rows]
    busy_share = wait_for_quiet(patience_s)
    with started(name, workload, threads, folder) as url:
        answer = np.asarray(ask(name, workload, url, workload.rows[0]))
        if answer.shape != expected.shape or not np.allclose(answer, expected, atol=ABSOLUTE_TOLERANCE):
            raise LoadFailed(f"another answer than the model's own: {answer[:4]}… instead of {expected[:4]}…")
        script = _warmed_up(url, folder, requests)
        closed = {connections: closed_loop(url, script, connections, seconds) for connections in CONNECTIONS}
        best = max(found.requests_per_s for found in closed.values())
        mix = _mix(url, requests)
        return {
            "requests_per_s": {connections: found.requests_per_s for connections, found in closed.items()},
            "p50_ms": {connections: found.p50_ms for connections, found in closed.items()},
            "p99_ms": {connections: found.p99_ms for connections, found in closed.items()},
            "open_loop": open_loop(url, mix, min(OPEN_LOAD * best, MAX_OPEN_RATE_PER_S), 2 * seconds),
            # By others before it started; the load average after includes its own.
            "cores_busy_before": busy_share,
            "load_average_after": round(os.getloadavg()[0], 2),
        }


def measure_at_rates(
    name: str,
    workload: Workload,
    rates_per_s: Mapping[str, float],
    *,
    threads: int,
    seconds: int,
    patience_s: float,
    folder: Path,
) -> dict[str, Figures]:
    """Start the server once more, for an open loop at each of the rates.

    Raises:
        StartFailed: it did not become ready.
        LoadFailed: requests failed.
    """
    requests = [CONTENDERS[name].dialect.encode(workload, row) for row in workload.rows]
    wait_for_quiet(patience_s)
    with started(name, workload, threads, folder) as url:
        _warmed_up(url, folder, requests)
        mix = _mix(url, requests)
        return {key: open_loop(url, mix, rate, 2 * seconds) for key, rate in rates_per_s.items()}


def _warmed_up(url: str, folder: Path, requests: Sequence[tuple[bytes, Headers]]) -> Path:
    """The script for wrk of the requests, after it has run for a while."""
    script = write_script(folder, requests)
    closed_loop(url, script, 32, WARMUP_S)
    return script


def _mix(url: str, requests: Sequence[tuple[bytes, Headers]]) -> Mix:
    return Mix(tuple(Exchange.post(url, body, dict(headers)) for body, headers in requests))


def open_loop(url: str, mix: Mix, rate_per_s: float, seconds: int) -> Figures:
    """Poisson arrivals at that rate.

    Raises:
        LoadFailed: no request succeeded.
    """
    random = np.random.default_rng(0)
    due_s = arrivals(rate_per_s, WARMUP_S + seconds, random)
    outcome = uvloop.run(send_all(url, mix, due_s, random, connections=512))
    found = outcome.after(WARMUP_S).summary()
    if not found["succeeded"]:
        raise LoadFailed(f"at {rate_per_s:.0f} requests/s none succeeded: {found['failures']}")
    return found


def torch_loop(workload: Workload, threads: int, seconds: int) -> dict[str, float]:
    """Rows per second of the bare loop, by rows per batch."""
    environment = {**os.environ, "BENCH_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    found = _python("loadtests.peers.torch_loop", [str(seconds)], workload.rows, environment)
    return {rows: float(rate) for rows, rate in found.items()}


def expected_output(workload: Workload) -> Array:
    """What the model itself says to the first row."""
    environment = {**os.environ, "BENCH_MODEL": workload.peer_model}
    return np.array(_python("loadtests.peers.model", [], workload.rows[:1], environment), dtype=np.float32)


def _python(module: str, arguments: list[str], rows: tuple[bytes, ...], environment: dict[str, str]) -> Any:
    """What a module of ours prints as JSON, in a process of its own, given the rows as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        input=json.dumps([row.decode("latin-1") for row in rows]).encode(),
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    return json.loads(done.stdout)
