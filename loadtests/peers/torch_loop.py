"""The bare loop: the model on one batch after another, nothing around it.

    python -m loadtests.peers.torch_loop SECONDS < TEXTS

Reads a JSON list of texts (each byte a character), draws batches from them as concurrent callers would mix
them, pads each beforehand, and prints {rows per batch: rows per second} as JSON. Tokenising is not in the
time.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch

from serving.models.minilm import MiniLM

ROWS = (1, 8, 16, 32)
BATCHES = 64


def main() -> None:
    """Measure each batch size for the given seconds."""
    torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    seconds, texts = float(sys.argv[1]), json.load(sys.stdin)
    print(json.dumps({rows: rows_per_s(texts, rows, seconds) for rows in ROWS}))


@torch.inference_mode()
def rows_per_s(texts: list[str], rows: int, seconds: float) -> float:
    """How many rows a loop does."""
    source, random = MiniLM(), np.random.default_rng(0)
    module = source.build()
    batches = []
    for _ in range(BATCHES):
        drawn = np.array([text.encode("latin-1") for text in random.choice(texts, rows)], dtype=object)
        batches.append([torch.from_numpy(array) for array in source.preprocess({"text": drawn}).values()])
    for batch in batches[:3]:
        module(*batch)
    done, start_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < seconds:
        module(*batches[done % BATCHES]).numpy()
        done += 1
    return round(done * rows / elapsed_s, 1)


if __name__ == "__main__":
    main()
