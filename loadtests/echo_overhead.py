"""What the runtime itself costs: Halftone against plain Ray Serve on a model that returns its input.

Both servers run in turn on the same cores, several rounds, under the same closed-loop load
(wrk, 1, 32 and 128 connections). Halftone parses an Open Inference Protocol request with a
binary FP32 tensor of 128 values, routes it by its precision header, batches, runs the echo
model at FP32 and counts; plain Ray Serve passes the same bytes through ingress and deployment.
Prints the medians over rounds and their ratios, and writes them to `loadtests/results/`.

    python loadtests/echo_overhead.py [--rounds 3] [--seconds 6]

Needs wrk (Debian: `apt-get install wrk`).
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from bar_chart import bar_chart

HERE = Path(__file__).resolve().parent
CONNECTIONS = (1, 32, 128)
VALUES = 128
START_TIMEOUT_S = 120.0

Measure = dict[int, tuple[float, float]]


def request_body() -> tuple[bytes, int]:
    """An inference request of one row of 128 FP32 values, and the length of its JSON part."""
    head = {
        "inputs": [
            {
                "name": "x",
                "shape": [1, VALUES],
                "datatype": "FP32",
                "parameters": {"binary_data_size": 4 * VALUES},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return text + struct.pack(f"<{VALUES}f", *(n / VALUES for n in range(VALUES))), len(text)


def wrk_script(folder: Path) -> Path:
    """The request for wrk."""
    body, json_length = request_body()
    (folder / "body.bin").write_bytes(body)
    script = folder / "request.lua"
    script.write_text(
        f"""
local file = io.open("{folder / "body.bin"}", "rb")
wrk.method, wrk.body = "POST", file:read("*a")
wrk.headers["content-type"] = "application/octet-stream"
wrk.headers["inference-header-content-length"] = "{json_length}"
wrk.headers["x-precision"] = "fp32"
"""
    )
    return script


def load(url: str, script: Path, connections: int, seconds: int) -> tuple[float, float]:
    """Requests per second and p50 in ms under a closed loop.

    Raises:
        RuntimeError: a request failed.
    """
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script), "--latency", url]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"requests failed:\n{output}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    p50 = re.search(r"50%\s+([\d.]+)(us|ms|s)", output)
    if rate is None or p50 is None:
        raise RuntimeError(f"unexpected output of wrk:\n{output}")
    return float(rate[1]), float(p50[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[p50[2]]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def halftone(log: Path) -> Iterator[str]:
    """Halftone with the echo model; its inference URL."""
    port = free_port()
    config = HERE.parent / "deployments" / "echo.yaml"
    command = [sys.executable, "-m", "serving.cli", "serve", str(config), "--port", str(port)]
    ready = f"http://127.0.0.1:{port}/v2/health/ready"
    with running(command, log, lambda: answers(ready)):
        yield f"http://127.0.0.1:{port}/v2/models/echo/infer"


@contextmanager
def plain_ray_serve(log: Path) -> Iterator[str]:
    """Plain Ray Serve; its URL."""
    port = free_port()
    command = [sys.executable, str(HERE / "plain_ray_serve.py"), str(port)]
    with running(command, log, lambda: "ready" in log.read_text(errors="replace")):
        yield f"http://127.0.0.1:{port}/"


def answers(url: str) -> bool:
    """Whether the URL answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  Our own loopback URL.
            return bool(response.status == 200)  # noqa: PLR2004
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def running(command: list[str], log: Path, is_ready: Callable[[], bool]) -> Iterator[None]:
    """A server process: started, awaited, and stopped."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{command} did not become ready:\n{log.read_text(errors='replace')}")
            time.sleep(0.2)
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def measure(
    server: Callable[[Path], AbstractContextManager[str]], folder: Path, script: Path, seconds: int
) -> Measure:
    """One round of one server: connections -> (requests/s, p50 in ms)."""
    with server(folder / "server.log") as url:
        load(url, script, 32, 2)  # Warm-up.
        return {connections: load(url, script, connections, seconds) for connections in CONNECTIONS}


def medians(rounds: list[Measure]) -> Measure:
    """The median of each figure over rounds."""
    return {
        connections: (
            statistics.median(one[connections][0] for one in rounds),
            statistics.median(one[connections][1] for one in rounds),
        )
        for connections in CONNECTIONS
    }


def report(found: dict[str, Measure], rounds: int, seconds: int) -> dict[str, Any]:
    """The figures and ratios as a JSON document."""
    ours, plain = found["halftone"], found["ray_serve"]
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "rounds": rounds,
        "seconds": seconds,
        "requests_per_s": {name: {c: round(m[c][0], 1) for c in CONNECTIONS} for name, m in found.items()},
        "p50_ms": {name: {c: round(m[c][1], 3) for c in CONNECTIONS} for name, m in found.items()},
        "ratios": {
            "echo/ray_serve": round(ours[32][0] / plain[32][0], 1),
            "echo/ray_serve@128": round(ours[128][0] / plain[128][0], 1),
            "p50_alone/ray_serve": round(ours[1][1] / plain[1][1], 3),
        },
    }


def write_chart(document: dict[str, Any]) -> None:
    """The README's picture."""
    rates = document["requests_per_s"]
    names = {"halftone": "Halftone", "ray_serve": "plain Ray Serve"}
    bars = [
        (f"{names[server]}, {connections} connections", rates[server][connections], server == "halftone")
        for connections in (32, 128)
        for server in names
    ]
    chart = HERE.parent / "docs" / "echo-overhead.svg"
    chart.parent.mkdir(exist_ok=True)
    chart.write_text(bar_chart("Echo model: requests per second on two cores", bars))


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=6)
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        print("echo_overhead: wrk is not installed (Debian: apt-get install wrk)", file=sys.stderr)
        return 2
    rounds: dict[str, list[Measure]] = {"halftone": [], "ray_serve": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = wrk_script(folder)
        for number in range(options.rounds):
            for server, run in (("halftone", halftone), ("ray_serve", plain_ray_serve)):
                rounds[server].append(measure(run, folder, script, options.seconds))
                print(f"round {number + 1}, {server}: {rounds[server][-1]}", flush=True)
    document = report({name: medians(all_) for name, all_ in rounds.items()}, options.rounds, options.seconds)
    write_chart(document)
    target = HERE / "results" / f"echo-overhead-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
