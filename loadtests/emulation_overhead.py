"""What emulated FP16 costs over FP32 on this CPU: `python loadtests/emulation_overhead.py`.

Runs both tiers of each embedded model by turns on one thread and prints the median times and
the median of the ratios of neighbouring runs, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving.models.efficientnet import EfficientNetLite0
from serving.models.minilm import MiniLM
from serving.models.source import ModelSource
from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.precision import Kind, PrecisionSpec

TOKENS = 32


def main() -> None:
    """Measure and print one line per model and batch size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", default="fp16", choices=("fp16", "bf16", "mixed"))
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each tier (default 15)")
    options = parser.parse_args()
    device = open_device("cpu", threads=1)
    print(f"{device.name}, torch {torch.__version__}, 1 thread, {options.kind} emulated")
    print(f"{'model':<18}{'rows':>5}{'fp32 ms':>10}{'emulated ms':>13}{'ratio':>8}")
    for source, inputs, batches in (
        (MiniLM(), tokens, (1, 8, 32)),
        (EfficientNetLite0(), images, (1, 8)),
    ):
        for rows in batches:
            fp32_ms, emulated_ms, ratio = measure(source, inputs(rows), options.kind, device, options.runs)
            name = type(source).__name__
            print(f"{name:<18}{rows:>5}{fp32_ms:>10.2f}{emulated_ms:>13.2f}{ratio:>8.2f}", flush=True)


def tokens(rows: int) -> list[torch.Tensor]:
    """Ids and mask, both [rows, TOKENS], without padding."""
    ids = np.random.default_rng(0).integers(1000, 30000, (rows, TOKENS))
    return [torch.from_numpy(ids), torch.ones(rows, TOKENS, dtype=torch.int64)]


def images(rows: int) -> list[torch.Tensor]:
    """Preprocessed examples, repeated: [rows, 3, 224, 224]."""
    source = EfficientNetLite0()
    image = source.preprocess(source.examples())["image"]
    return [torch.from_numpy(np.resize(image, (rows, *image.shape[1:])))]


def measure(
    source: ModelSource, inputs: Sequence[torch.Tensor], kind: Kind, device: Device, runs: int
) -> tuple[float, float, float]:
    """Median milliseconds at FP32, emulated, and the median ratio."""
    module = source.build()
    tiers = [convert(module, PrecisionSpec(k), device, inputs) for k in ("fp32", kind)]
    for tier in tiers:
        milliseconds(tier, inputs)
    pairs = [tuple(milliseconds(tier, inputs) for tier in tiers) for _ in range(runs)]
    fp32_ms, emulated_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    return fp32_ms, emulated_ms, statistics.median(emulated / fp32 for fp32, emulated in pairs)


def milliseconds(tier: Callable[..., object], inputs: Sequence[torch.Tensor]) -> float:
    """Wall time of one forward pass."""
    start_s = time.perf_counter()
    tier(*inputs)
    return (time.perf_counter() - start_s) * 1e3


if __name__ == "__main__":
    main()
