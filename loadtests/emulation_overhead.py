"""What each emulated tier costs over FP32 on this CPU: `python loadtests/emulation_overhead.py`.

Runs every tier of each embedded model and the FP32 one by turns on one thread and prints the
median times and the median of the ratios of neighbouring runs, which a busy machine disturbs
less. `fp16@910a` is the tier fp16 with a rehearsed 910A.
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
from serving.numerics.conversion import convert
from serving.numerics.devices import open_device
from serving.numerics.precision import PrecisionSpec
from serving.numerics.tier_module import TierModule

TOKENS = 32
TIERS = (
    "fp16", "mixed", "bf16", "autocast", "layercast", "fp16@910a", "autocast@910a", "fp32@910a", "hf32@910b",
)  # fmt: skip


def main() -> None:
    """Measure and print one line per model, batch size and tier."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiers", nargs="+", default=TIERS, choices=TIERS, metavar="TIER", help="default: all"
    )
    parser.add_argument("--runs", type=int, default=15, help="timed runs of each tier (default 15)")
    options = parser.parse_args()
    print(f"{open_device('cpu', threads=1).name}, torch {torch.__version__}, 1 thread")
    print(f"{'model':<18}{'rows':>5}  {'tier':<14}{'fp32 ms':>10}{'tier ms':>10}{'ratio':>8}")
    for source, inputs, batches in (
        (MiniLM(), tokens, (1, 8, 32)),
        (EfficientNetLite0(), images, (1, 8)),
    ):
        module = source.build()
        for tier in options.tiers:
            for rows in batches:
                fp32_ms, tier_ms, ratio = measure(module, inputs(rows), tier, options.runs)
                name = type(source).__name__
                print(
                    f"{name:<18}{rows:>5}  {tier:<14}{fp32_ms:>10.2f}{tier_ms:>10.2f}{ratio:>8.2f}",
                    flush=True,
                )


def tokens(rows: int) -> list[torch.Tensor]:
    """Ids and mask, both [rows, TOKENS], without padding."""
    ids = np.random.default_rng(0).integers(1000, 30000, (rows, TOKENS))
    return [torch.from_numpy(ids), torch.ones(rows, TOKENS, dtype=torch.int64)]


def images(rows: int) -> list[torch.Tensor]:
    """Preprocessed examples, repeated: [rows, 3, 224, 224]."""
    source = EfficientNetLite0()
    image = source.preprocess(source.examples())["image"]
    return [torch.from_numpy(np.resize(image, (rows, *image.shape[1:])))]


def converted(module: torch.nn.Module, tier: str, inputs: Sequence[torch.Tensor]) -> TierModule:
    """The module at `kind` or `kind@card`."""
    kind, _, card = tier.partition("@")
    return convert(module, PrecisionSpec(kind), open_device("cpu", 1, card or "ieee"), inputs)  # type: ignore[arg-type]


def measure(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], tier: str, runs: int
) -> tuple[float, float, float]:
    """Median milliseconds at FP32, at the tier, and the median ratio."""
    both = [converted(module, name, inputs) for name in ("fp32", tier)]
    for converted_module in both:
        milliseconds(converted_module, inputs)
    pairs = [tuple(milliseconds(each, inputs) for each in both) for _ in range(runs)]
    fp32_ms, tier_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    return fp32_ms, tier_ms, statistics.median(slow / fast for fast, slow in pairs)


def milliseconds(tier: Callable[..., object], inputs: Sequence[torch.Tensor]) -> float:
    """Wall time of one forward pass."""
    start_s = time.perf_counter()
    tier(*inputs)
    return (time.perf_counter() - start_s) * 1e3


if __name__ == "__main__":
    main()
