"""Throughput: wrk's closed loop, a fixed number of connections that each wait for their answer."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.bench.workload import Headers

_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}
_SCRIPT = """
local requests = {}
local function read(path)
  local file = io.open(path, "rb")
  local text = file:read("*a")
  file:close()
  return text
end
function init(args)
  for number = 1, COUNT do
    requests[number] = wrk.format("POST", nil, HEADERS[number], read(FOLDER .. number))
  end
end
local last = 0
function request() last = last % COUNT + 1 return requests[last] end
"""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """What wrk found."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float


class LoadFailed(Exception):
    """Requests failed, or wrk did."""


def write_script(folder: Path, requests: Sequence[tuple[bytes, Headers]]) -> Path:
    """A Lua script for wrk that sends the requests in turn."""
    tables = []
    for number, (body, headers) in enumerate(requests, start=1):
        (folder / f"body{number}").write_bytes(body)
        tables.append("{" + ", ".join(f'["{name}"] = "{value}"' for name, value in headers.items()) + "}")
    settings = f'COUNT, FOLDER = {len(requests)}, "{folder}/body"\nHEADERS = {{{", ".join(tables)}}}\n'
    script = folder / "requests.lua"
    script.write_text(settings + _SCRIPT)
    return script


def closed_loop(url: str, script: Path, connections: int, seconds: float) -> ClosedLoop:
    """Load a server.

    Raises:
        LoadFailed: a request failed, or none was answered.
    """
    command = [
        "wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "--timeout", "30s", "--latency",
        "-s", str(script), url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    percentiles = {
        percent: float(value) * _MS[unit]
        for percent, value, unit in re.findall(r"(50|99)%\s+([\d.]+)(us|ms|s|m)", output)
    }
    if (
        done.returncode
        or rate is None
        or not float(rate[1])
        or "Non-2xx" in output
        or "Socket errors" in output
    ):
        raise LoadFailed(f"{connections} connections: {output}{done.stderr}".strip())
    return ClosedLoop(float(rate[1]), round(percentiles["50"], 3), round(percentiles["99"], 3))
