r"""Load a Halftone server as independent callers do, who don't wait for one another.

    python -m loadtests.open_loop http://127.0.0.1:8000 --model text --rate 100 --seconds 30 \
        --precision fp32=0.2,fp16=0.5,critical=0.3 --rows 1=0.8,4=0.2 --bursts 5:0.1:2

Prints rates and exact percentiles, measured from when each request was due, as JSON. Exit status: 0; 1 when
the generator did not keep up, a request failed, or a tier answered that is less precise than declared; 2
for wrong arguments. `--self-test` shows whether the generator can be trusted on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import uvloop

from loadtests.open_loop.arrivals import Bursts, arrivals
from loadtests.open_loop.generator import send_all
from loadtests.open_loop.inference import mix_for
from loadtests.open_loop.self_test import self_test


def shares(text: str) -> dict[str, float]:
    """`a=0.2,b=0.8`, or one name alone."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): float(share or 1) for name, _, share in pairs}


def bursts(text: str) -> Bursts:
    """`FACTOR:SHARE:PERIOD_S`."""
    factor, share, period_s = map(float, text.split(":"))
    return Bursts(factor, share, period_s)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtests.open_loop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("server", nargs="?", help="http://host:port")
    made.add_argument("--self-test", action="store_true")
    made.add_argument("--model", default="text")
    made.add_argument("--rate", type=float, default=50.0, help="mean requests per second (default 50)")
    made.add_argument("--seconds", type=float, default=20.0, help="after the warm-up (default 20)")
    made.add_argument("--warmup", type=float, default=2.0, help="seconds sent but not measured (default 2)")
    made.add_argument("--precision", type=shares, default={"fp32": 1.0}, metavar="NAME=SHARE,…")
    made.add_argument("--rows", type=shares, default={"1": 1.0}, metavar="COUNT=SHARE,…")
    made.add_argument("--format", type=shares, default={"binary": 1.0}, metavar="binary=SHARE,json=SHARE")
    made.add_argument("--bursts", type=bursts, metavar="FACTOR:SHARE:PERIOD_S", help="as in 5:0.1:2")
    made.add_argument("--connections", type=int, default=256, help="most requests in flight (default 256)")
    made.add_argument("--seed", type=int, default=0)
    return made


def main() -> int:
    """Run once."""
    options = parser().parse_args()
    if options.self_test:
        return 0 if self_test() else 1
    if options.server is None:
        parser().error("which server?")
    random = np.random.default_rng(options.seed)
    rows = {int(count): share for count, share in options.rows.items()}
    mix = mix_for(options.server, options.model, options.precision, rows, options.format)
    due_s = arrivals(options.rate, options.warmup + options.seconds, random, options.bursts)
    outcome = uvloop.run(send_all(options.server, mix, due_s, random, connections=options.connections))
    found = outcome.after(options.warmup).summary()
    print(json.dumps(found, indent=2))
    if not found["kept_up"]:
        print(
            "The generator did not keep up: requests waited for a free connection, or it ran late itself. "
            "The percentiles contain that.",
            file=sys.stderr,
        )
    return 0 if found["kept_up"] and not found["failures"] and not found["precision_violations"] else 1


if __name__ == "__main__":
    sys.exit(main())
