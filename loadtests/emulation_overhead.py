"""What emulation costs over FP32 on this CPU, and how true it is: `python loadtests/emulation_overhead.py`.

Cost: runs every tier of each embedded model and the FP32 one by turns on one thread and prints the
median times and the median of the ratios of neighbouring runs, which a busy machine disturbs
less. `fp16@910a` is the tier fp16 with a rehearsed 910A.

Truth: how far the fp16 tier is from FP32, emulated and with torch's own half kernels, on sentences
of Python's documentation and on drawn images, each turned and mirrored. Relative L2 per row, root
mean square over rows. The bars are 1.6 times FP32's time for fp16, and a divergence within 25 % of
torch's own. Results go to `loadtests/results/`.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loadtests.result_file import conditions, keep
from serving.models.efficientnet import EfficientNetLite0
from serving.models.minilm import MiniLM
from serving.numerics.conversion import convert
from serving.numerics.devices import open_device
from serving.numerics.precision import PrecisionSpec
from serving.numerics.tier_module import TierModule

TOKENS = 32
SENTENCES = 64
MAX_TIME_RATIO = 1.6
MAX_DIVERGENCE_OFF = 0.25
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
    processor = open_device("cpu", threads=1).name
    print(f"{processor}, torch {torch.__version__}, 1 thread")
    costs = measure_costs(options.tiers, options.runs)
    divergences = measure_divergences()
    fp16_ratios = [cost["ratio"] for cost in costs if cost["tier"] == "fp16"]
    document = {
        **conditions(),
        "torch": f"{torch.__version__}, 1 thread",
        "runs": options.runs,
        "costs": costs,
        "divergences": divergences,
        "within_bars": {
            "fp16_time": max(fp16_ratios) <= MAX_TIME_RATIO if fp16_ratios else None,
            "fp16_divergence": all(
                abs(found["emulated_over_native"] - 1) <= MAX_DIVERGENCE_OFF for found in divergences
            ),
        },
    }
    print(f"within the bars: {document['within_bars']}; written to {keep('emulation-overhead', document)}")


def measure_costs(tiers: Sequence[str], runs: int) -> list[dict[str, Any]]:
    """Print and return a line per model, batch size and tier."""
    print(f"{'model':<18}{'rows':>5}  {'tier':<14}{'fp32 ms':>10}{'tier ms':>10}{'ratio':>8}")
    costs = []
    for source, inputs, batches in (
        (MiniLM(), tokens, (1, 8, 32)),
        (EfficientNetLite0(), images, (1, 8)),
    ):
        module, name = source.build(), type(source).__name__
        for tier in tiers:
            for rows in batches:
                fp32_ms, tier_ms, ratio = measure(module, inputs(rows), tier, runs)
                print(
                    f"{name:<18}{rows:>5}  {tier:<14}{fp32_ms:>10.2f}{tier_ms:>10.2f}{ratio:>8.2f}",
                    flush=True,
                )
                figures = {
                    "fp32_ms": round(fp32_ms, 2),
                    "tier_ms": round(tier_ms, 2),
                    "ratio": round(ratio, 3),
                }
                costs.append({"model": name, "rows": rows, "tier": tier, **figures})
    return costs


def measure_divergences() -> list[dict[str, Any]]:
    """Print and return a line per model."""
    print(f"{'model':<18}{'rows':>5}  {'emulated':>10}{'native':>10}{'ratio':>8}   relative L2 to FP32")
    found = []
    for source, inputs in ((MiniLM(), sentences()), (EfficientNetLite0(), turned_images())):
        module, name, rows = source.build(), type(source).__name__, inputs[0].shape[0]
        device = open_device("cpu", threads=1)
        reference = convert(module, PrecisionSpec("fp32"), device)(*inputs)
        emulated, native = (
            distance(convert(module, PrecisionSpec("fp16", native=native), device)(*inputs), reference)
            for native in (False, True)
        )
        print(f"{name:<18}{rows:>5}  {emulated:>10.2e}{native:>10.2e}{emulated / native:>8.2f}", flush=True)
        figures = {
            "emulated": emulated,
            "native": native,
            "emulated_over_native": round(emulated / native, 3),
        }
        found.append({"model": name, "rows": rows, **figures})
    return found


def distance(answers: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 of each row of [rows, n], root mean square over rows."""
    rows = (answers - reference).norm(dim=1) / reference.norm(dim=1)
    return float(rows.square().mean().sqrt())


def sentences() -> list[torch.Tensor]:
    """Ids and mask of sentences of Python's documentation, padded."""
    text = " ".join(pydoc_data.topics.topics.values())
    found = [part.strip() for part in re.split(r"(?<=[.])\s+", re.sub(r"\s+", " ", text))]
    chosen = [part for part in found if 40 < len(part) < 160][:: len(found) // (3 * SENTENCES)][:SENTENCES]  # noqa: PLR2004
    texts = np.array([part.encode() for part in chosen], dtype=object)
    return [torch.from_numpy(array) for array in MiniLM().preprocess({"text": texts}).values()]


def turned_images() -> list[torch.Tensor]:
    """The drawn images by quarter turns and mirrored: [16, 3, 224, 224]."""
    source = EfficientNetLite0()
    drawn = source.examples()["image"]
    turned = [np.rot90(drawn, turns, (1, 2)) for turns in range(4)]
    every = np.concatenate([*turned, *(image[:, :, ::-1] for image in turned)])
    return [torch.from_numpy(source.preprocess({"image": every})["image"])]


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
