"""What the overflow guard costs, as a share of the forward pass: `python loadtests/guard_cost.py`.

Runs the FP16 tier of each embedded model without a guard, with `guard: output` and with
`guard: deep` by turns, on one thread and a full batch at a time, and prints the median of the
ratios of neighbouring runs, which a busy machine disturbs less. `--device cuda` measures on a GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving.models.efficientnet import EfficientNetLite0
from serving.models.minilm import MiniLM
from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.guard import Guard
from serving.numerics.precision import PrecisionSpec
from serving.numerics.tier_module import TierModule

MODES = ("output", "deep")
TOKENS = 32
#: Untimed passes before the first timed one.
WARM_UPS = 3


def main() -> None:
    """Measure and print one line per model, batch size and mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=25, help="timed runs of each (default 25)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="+", default=(8, 32), help="batch sizes (default 8 32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    device = open_device(options.device, 1, "auto" if options.device == "cuda" else "ieee", tier="fp16")
    print(f"{device.name}, torch {torch.__version__}, {options.runs} runs")
    print(f"{'model':<18}{'rows':>5}  {'guard':<8}{'without ms':>12}{'with ms':>10}{'cost':>9}")
    costs = []
    for source, inputs in ((MiniLM(), tokens), (EfficientNetLite0(), images)):
        module = source.build()
        for rows in options.rows:
            batch = device.to_device(inputs(rows))
            with device.running():
                tier = convert(module, PrecisionSpec("fp16"), device, batch)
                for mode in MODES:
                    without_ms, with_ms, ratio = measure(tier, mode, batch, device, options.runs)
                    name = type(source).__name__
                    cost = {"model": name, "rows": rows, "guard": mode, "without_ms": round(without_ms, 3)}
                    costs.append({**cost, "with_ms": round(with_ms, 3), "ratio": round(ratio, 4)})
                    print(
                        f"{name:<18}{rows:>5}  {mode:<8}{without_ms:>12.2f}{with_ms:>10.2f}{ratio - 1:>8.1%}",
                        flush=True,
                    )
    if options.json is not None:
        machine = f"{device.name}, torch {torch.__version__}" + (", 1 thread" if device.kind == "cpu" else "")
        date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        document = {"date": date, "machine": machine, "runs": options.runs, "costs": costs}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def tokens(rows: int) -> list[np.ndarray]:
    """Ids and mask, both [rows, TOKENS], without padding."""
    ids = np.random.default_rng(0).integers(1000, 30000, (rows, TOKENS))
    return [ids, np.ones((rows, TOKENS), np.int64)]


def images(rows: int) -> list[np.ndarray]:
    """Preprocessed examples, repeated: [rows, 3, 224, 224]."""
    source = EfficientNetLite0()
    image = source.preprocess(source.examples())["image"]
    return [np.resize(image, (rows, *image.shape[1:]))]


def measure(
    tier: TierModule, mode: str, batch: list[torch.Tensor], device: Device, runs: int
) -> tuple[float, float, float]:
    """Median milliseconds without and with the guard, and the median ratio."""
    guard = Guard(tier, mode, [False])  # type: ignore[arg-type]  # One of MODES.
    guard.learn([batch, [torch.cat([tensor, tensor[:1]]) for tensor in batch]])

    def plain() -> object:
        return device.to_host(tier(*batch))

    def guarded() -> object:
        return [device.to_host(tensor) for tensor in guard.run(batch, lambda returned: [returned])]

    for _ in range(WARM_UPS):
        plain(), guarded()
    pairs = []
    for run in range(runs):
        # The second of a pair finds warmer caches; they take turns.
        order = (plain, guarded) if run % 2 else (guarded, plain)
        took = {each: milliseconds(each) for each in order}
        pairs.append((took[plain], took[guarded]))
    without_ms, with_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    return without_ms, with_ms, statistics.median(slow / fast for fast, slow in pairs)


def milliseconds(forward: Callable[[], object]) -> float:
    """Wall time of one forward pass, its results on the host."""
    start_s = time.perf_counter()
    forward()
    return (time.perf_counter() - start_s) * 1e3


if __name__ == "__main__":
    main()
