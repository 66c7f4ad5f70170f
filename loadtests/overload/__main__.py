"""Ask a server of its own for ten times what it can give: `make overload`.

    python -m loadtests.overload --times 10 --seconds 20

The model sleeps, so its capacity is known (80 rows a second) and no core is short. Requests leave in an open
loop, half of them sensitive (`critical`, `fp32`), half not. Exit status 1 unless every request was answered
200 or refused 503 with `Retry-After`, the median refusal took at most 50 ms from when its request was due, no
answer came from a less precise tier than declared, at least half of the capacity was used, and the generator
kept up.

Writes its result to `loadtests/results/overload-<date>.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from loadtests.open_loop import Outcome, arrivals, send_all
from loadtests.open_loop.generator import OVERLOADED
from loadtests.open_loop.inference import mix_for
from loadtests.overload.paced_model import SECONDS_PER_BATCH
from loadtests.result_file import conditions, keep
from loadtests.server_process import ROOT, halftone

CONFIG = ROOT / "loadtests" / "overload" / "server.yaml"
#: Two tiers, four rows a batch.
CAPACITY_PER_S = 2 * 4 / SECONDS_PER_BATCH
PRECISIONS = {"critical": 1.0, "fp32": 1.0, "standard": 1.0, "": 1.0}
MAX_REFUSAL_MS = 50.0
MIN_USED_SHARE = 0.5
#: More than all queues hold.
_CONNECTIONS = 1024
_OK = 200


def report(outcome: Outcome, times: float, duration_s: float) -> dict[str, Any]:
    """What became of the requests, and what is wrong with that."""
    refused = outcome.status == OVERLOADED
    took_ms = (outcome.done_s - outcome.due_s)[refused] * 1000
    quantiles = {f"p{p}": round(float(np.percentile(took_ms, p)), 2) for p in (50, 90, 99) if len(took_ms)}
    answered = int(np.count_nonzero(outcome.status == _OK))
    summary = outcome.summary()
    problems = [
        f"{count} replies {status}"
        for status, count in Counter(outcome.status.tolist()).items()
        if status not in {_OK, OVERLOADED}
    ]
    if outcome.violations:
        problems.append(f"{outcome.violations} answers by a less precise tier than declared")
    if outcome.unannounced:
        problems.append(f"{outcome.unannounced} refusals without Retry-After")
    if not quantiles:
        problems.append("nothing was refused")
    elif quantiles["p50"] > MAX_REFUSAL_MS:
        problems.append(f"the median refusal took {quantiles['p50']} ms")
    if answered < MIN_USED_SHARE * CAPACITY_PER_S * duration_s:
        problems.append(f"only {answered} were answered")
    if not summary["kept_up"]:
        problems.append("the generator did not keep up")
    return {
        "capacity_per_s": CAPACITY_PER_S,
        "times": times,
        "offered_per_s": summary["offered_per_s"],
        "offered/capacity": round((summary["offered_per_s"] or 0.0) / CAPACITY_PER_S, 2),
        "answered": answered,
        "answered_per_s/capacity": round(answered / duration_s / CAPACITY_PER_S, 2),
        "refused": int(np.count_nonzero(refused)),
        "refusal_ms": quantiles,
        "precision_violations": outcome.violations,
        "generator_lag_p99_ms": summary["generator_lag_p99_ms"],
        "problems": problems,
    }


def main() -> int:
    """Overload, report. Returns 0 where all was as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--times", type=float, default=10.0, help="of the capacity (default 10)")
    parser.add_argument("--seconds", type=float, default=20.0, help="(default 20)")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="ho", dir="/tmp") as name:
        environment = {"TMPDIR": name, "PYTHONPATH": str(ROOT)}
        with halftone(CONFIG, Path(name) / "log", environment) as (url, _):
            mix = mix_for(url, "paced", PRECISIONS, {1: 1.0}, {"binary": 1.0, "json": 1.0})
            due_s = arrivals(options.times * CAPACITY_PER_S, options.seconds, random)
            outcome = uvloop.run(send_all(url, mix, due_s, random, connections=_CONNECTIONS))
    document = {
        **conditions(),
        "seconds": options.seconds,
        **report(outcome, options.times, options.seconds),
    }
    keep("overload", document)
    print(json.dumps(document, indent=2))
    return 1 if document["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
