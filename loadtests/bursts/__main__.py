"""Batching under bursts: two configurations, the same arrivals, side by side.

    python -m loadtests.bursts fixed.yaml adaptive.yaml --rate 60 --bursts 4:0.2:2

Starts `halftone serve` with each configuration in turn, in rounds, sends both the same Poisson arrivals
with the same bursts, and prints the medians of percentiles over rounds, counted from when each request was
due, and the ratios of the second configuration's to the first one's. Without --rate, the mean rate is
--load of what the first one manages alone. Writes `loadtests/results/bursts-<date>.json`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from loadtests.bench.report import medians
from loadtests.open_loop import Bursts, arrivals, send_all
from loadtests.open_loop.__main__ import bursts, shares
from loadtests.open_loop.inference import mix_for
from loadtests.result_file import conditions, keep
from loadtests.server_process import halftone

WARMUP_S = 2.0
#: For the rate: so many requests due at once, all sent over this many connections.
PROBE_REQUESTS, PROBE_CONNECTIONS = 256, 64


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bursts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("configs", nargs=2, type=Path, help="two configurations of the same model")
    parser.add_argument("--model", default="text")
    parser.add_argument("--precision", type=shares, default={"fp32": 1.0}, metavar="NAME=SHARE,…")
    parser.add_argument("--rate", type=float, help="mean requests per second")
    parser.add_argument("--load", type=float, default=0.5, help="of the rate that the first one manages")
    parser.add_argument("--bursts", type=bursts, default=Bursts(4, 0.2, 2.0), metavar="FACTOR:SHARE:PERIOD_S")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def one_run(config: Path, options: argparse.Namespace, rate: float | None) -> dict[str, Any]:
    """The summary of one server's run."""
    # Short, since Ray's sockets lie in it.
    with (
        tempfile.TemporaryDirectory(prefix="hu", dir="/tmp") as folder,
        halftone(config.resolve(), Path(folder) / "log", {"TMPDIR": folder}) as (url, _),
    ):
        mix = mix_for(url, options.model, options.precision, {1: 1.0}, {"binary": 1.0})
        random = np.random.default_rng(0)
        at_once = np.zeros(PROBE_REQUESTS)
        probe = uvloop.run(send_all(url, mix, at_once, random, connections=PROBE_CONNECTIONS))
        mean = rate or options.load * PROBE_REQUESTS / float(np.nanmax(probe.done_s))
        due_s = arrivals(mean, WARMUP_S + options.seconds, random, options.bursts)
        outcome = uvloop.run(send_all(url, mix, due_s, random, connections=1024))
        return {"mean_rate_per_s": round(mean, 1), **outcome.after(WARMUP_S).summary()}


def main() -> int:
    """Run both by turns."""
    options = options_of()
    first, second = options.configs
    rounds: dict[Path, list[dict[str, Any]]] = {first: [], second: []}
    rate = options.rate
    for number in range(options.rounds):
        for config in (first, second) if number % 2 == 0 or rate is None else (second, first):
            rounds[config].append(one_run(config, options, rate))
            rate = rate or rounds[config][-1]["mean_rate_per_s"]  # Equal load for all that follow.
            print(f"round {number + 1}, {config.name}: {rounds[config][-1]}", flush=True)
    found = {config.name: medians(runs) for config, runs in rounds.items()}
    ratios = {
        name: round(found[second.name]["latency_ms"][name] / found[first.name]["latency_ms"][name], 3)
        for name in ("p50", "p90", "p99", "max")
    }
    document = {
        **conditions(),
        "arrivals": f"Poisson, {rate:g}/s on average, {options.bursts}",
        "rounds": options.rounds,
        "configs": {config.name: config.read_text(encoding="utf-8") for config in (first, second)},
        "results": found,
        f"{second.stem}/{first.stem}": ratios,
    }
    print(f"{second.stem}/{first.stem}: {ratios}; written to {keep('bursts', document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
