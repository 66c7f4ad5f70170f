"""Halftone beside other servers: `make bench [ONLY=litserve,mosec] [WORKLOADS=echo] [ROUNDS=3] [SECONDS=5]`.

Echo (128 FP32 values per request) and a sentence encoder of 22.6 M parameters (a sentence per request), at
FP32. Every server runs the same model code on the same cores with the same number of torch threads, batches
up to 32 rows and waits up to 2 ms for them. Servers are started in turn, in rounds; figures are medians over
rounds. wrk gives the closed loop at 1, 32 and 128 connections; then Poisson arrivals at 70 % of the server's
own best give the p99, counted from when each request was due; at the end of a round Halftone gets the loads
that the others were given in it. Answers are compared with the model's first.
Ctrl-C ends early, and reports the rounds so far.

Writes `loadtests/results/<date>.json` and `.md`; a run of all servers also draws `docs/bench.svg`, a run of
some writes `<date>-partial.json`. A server that does not start or fails requests is listed with the reason.
Needs wrk (Debian: `apt-get install wrk`).
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtests.bench import report
from loadtests.bench.bar_chart import bar_charts
from loadtests.bench.closed_loop import LoadFailed
from loadtests.bench.contender import CONTENDERS, OURS
from loadtests.bench.measurement import (
    CONNECTIONS,
    MAX_OPEN_RATE_PER_S,
    OPEN_LOAD,
    Figures,
    expected_output,
    measure,
    measure_at_rates,
    torch_loop,
)  # fmt: skip
from loadtests.bench.workload import Workload, workloads
from loadtests.result_file import RESULTS
from loadtests.server_process import ROOT, StartFailed

#: After so many failed rounds a server is not tried again.
MAX_FAILURES = 2


def names(known: Sequence[str]) -> Any:
    """A parser of comma-separated names."""

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return parse


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    # The other half is for HTTP and the generators: threads that outnumber free cores wait for one another.
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    peers = [name for name in CONTENDERS if name != OURS]
    parser.add_argument("--only", type=names(peers), default=[], metavar="PEER,…", help=", ".join(peers))
    parser.add_argument("--workloads", type=names(("echo", "model")), default=["echo", "model"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=int, default=5, help="of each closed loop; open loops take twice that"
    )
    parser.add_argument(
        "--threads", type=int, default=threads, help="of torch, per server (default: half of the cores)"
    )
    parser.add_argument(
        "--patience", type=float, default=30.0, help="seconds to wait for a quiet machine before each server"
    )
    return parser.parse_args(arguments)


class Bench:
    """The rounds, and what came of them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        chosen = workloads(options.threads)
        self._workloads = [chosen[name] for name in options.workloads]
        self._servers = [OURS, *(options.only or [name for name in CONTENDERS if name != OURS])]
        self._rounds: dict[tuple[str, str], list[Figures]] = defaultdict(list)
        self._torch_rounds: list[dict[str, float]] = []
        self._failed: dict[str, list[str]] = defaultdict(list)

    def run(self) -> None:
        """All rounds. The order of servers turns by one each round."""
        expected = {workload.name: expected_output(workload) for workload in self._workloads}
        for number in range(self._options.rounds):
            shift = number % len(self._servers)
            for workload in self._workloads:
                order = self._servers[shift:] + self._servers[:shift]
                found = {
                    server: self._one(number, workload, server, expected[workload.name]) for server in order
                }
                self._ours_at_their_rates(number, workload, found)
                if workload.name == "model":
                    bare = torch_loop(workload, self._options.threads, self._options.seconds)
                    self._torch_rounds.append(bare)
                    print(f"round {number + 1}, torch loop: {bare}", flush=True)

    def _one(self, number: int, workload: Workload, server: str, expected: Any) -> Figures | None:
        key = f"{workload.name}/{server}"
        if len(self._failed[key]) >= MAX_FAILURES:
            return None
        folder = self._folder / f"{server[:8]}{workload.name[0]}{number}"
        try:
            figures = measure(
                server,
                workload,
                expected,
                threads=self._options.threads,
                seconds=self._options.seconds,
                patience_s=self._options.patience,
                folder=folder,
            )
        except (StartFailed, LoadFailed) as error:
            self._failed[key].append(str(error))
            print(f"round {number + 1}, {key}: {error}", flush=True)
            return None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._rounds[workload.name, server].append(figures)
        rates = {connections: round(rate) for connections, rate in figures["requests_per_s"].items()}
        p99_ms = figures["open_loop"]["latency_ms"].get("p99")
        print(f"round {number + 1}, {key}: requests/s {rates}, open-loop p99 {p99_ms} ms", flush=True)
        return figures

    def _ours_at_their_rates(
        self, number: int, workload: Workload, found: Mapping[str, Figures | None]
    ) -> None:
        """Halftone's open loops at the rates of the others', each noted with the other's figures."""
        theirs = {server: figures for server, figures in found.items() if figures and server != OURS}
        if not theirs or not found[OURS]:
            return
        folder = self._folder / f"rates{workload.name[0]}{number}"
        try:
            ours = measure_at_rates(
                OURS,
                workload,
                {server: figures["open_loop"]["offered_per_s"] for server, figures in theirs.items()},
                threads=self._options.threads,
                seconds=self._options.seconds,
                patience_s=self._options.patience,
                folder=folder,
            )
        except (StartFailed, LoadFailed) as error:
            self._failed[f"{workload.name}/{OURS}"].append(str(error))
            print(f"round {number + 1}, {workload.name}/{OURS} at the others' rates: {error}", flush=True)
            return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for server, figures in theirs.items():
            figures["halftone_at_its_rate"] = ours[server]
        p99_ms = {server: one["latency_ms"].get("p99") for server, one in ours.items()}
        print(
            f"round {number + 1}, {workload.name}/{OURS} at the others' rates, p99 in ms: {p99_ms}",
            flush=True,
        )

    def results(self) -> report.Results:
        """Medians over rounds, by workload and server."""
        found: report.Results = {workload.name: {} for workload in self._workloads}
        for workload in found:
            for server in self._servers:
                if rounds := self._rounds.get((workload, server)):
                    found[workload][server] = {**report.medians(rounds), "rounds": rounds}
        return found

    def rounds_measured(self) -> dict[str, int]:
        """Of each workload and server: fewer than asked where rounds failed or the run was interrupted."""
        return {f"{workload}/{server}": len(rounds) for (workload, server), rounds in self._rounds.items()}

    def failures(self) -> dict[str, str]:
        """Of each workload and server that lost rounds: how many, and why the last one."""
        return {
            key: f"{len(reasons)} of {self._options.rounds} rounds failed, the last one: {reasons[-1]}"
            for key, reasons in self._failed.items()
            if reasons
        }

    def torch_loop(self) -> dict[str, float]:
        """Medians over rounds."""
        return report.medians(self._torch_rounds) if self._torch_rounds else {}


def main() -> int:
    """Run the comparison."""
    options = options_of()
    if shutil.which("wrk") is None:
        print("bench: wrk is not installed (Debian: apt-get install wrk)", file=sys.stderr)
        return 2
    began_s, began_load = time.monotonic(), os.getloadavg()
    # Short, since Ray's sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="hb", dir="/tmp", ignore_cleanup_errors=True) as name:
        bench = Bench(options, Path(name))
        try:
            bench.run()
        except KeyboardInterrupt:
            print("interrupted: what follows is of the rounds so far", flush=True)
    conditions = {
        "rounds_asked": options.rounds,
        "rounds_measured": bench.rounds_measured(),
        "seconds_per_closed_loop": options.seconds,
        "seconds_per_open_loop": 2 * options.seconds,
        "connections": CONNECTIONS,
        "open_loop_load": OPEN_LOAD,
        "open_loop_max_rate_per_s": MAX_OPEN_RATE_PER_S,
        "torch_threads": options.threads,
        "generators": "wrk with one thread, and the open-loop generator, on the same cores as the server",
        "load_average": {"before": began_load, "after": os.getloadavg()},
        "minutes": round((time.monotonic() - began_s) / 60, 1),
    }
    found = report.document(bench.results(), bench.torch_loop(), bench.failures(), conditions)
    write(found, is_partial=bool(options.only) or len(options.workloads) == 1)
    print(json.dumps({"ratios": found["ratios"], "failures": found["failures"]}, indent=2))
    return 0


def write(found: dict[str, Any], *, is_partial: bool) -> None:
    """The files, and the table on the terminal."""
    stem = dt.datetime.now(dt.UTC).date().isoformat() + ("-partial" if is_partial else "")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{stem}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    text = report.table(found)
    (RESULTS / f"{stem}.md").write_text(text + "\n", encoding="utf-8")
    if not is_partial:
        picture = bar_charts("Requests per second of Halftone and other servers", report.panels(found))
        (ROOT / "docs" / "bench.svg").write_text(picture, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
