"""The models that every server of the benchmark runs: Halftone's own, called by a plain function.

`BENCH_MODEL` names one, `BENCH_THREADS` is how many threads torch may use.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from serving.models.echo import Echo
from serving.models.minilm import MiniLM

MAX_ROWS, MAX_WAIT_MS = 32, 2.0
NAME = os.environ.get("BENCH_MODEL", "echo")

Batch = NDArray[np.float32]


def load() -> Callable[[Sequence[bytes]], Batch]:
    """A function from the rows of a batch to its outputs.

    A row is what one request carries: 128 little-endian FP32 values, or a text in UTF-8.
    """
    torch.set_num_threads(int(os.environ.get("BENCH_THREADS", "1")))
    return load_echo() if NAME == "echo" else load_text()


def load_echo() -> Callable[[Sequence[bytes]], Batch]:
    """128 FP32 values -> the same."""
    module = Echo().build()

    @torch.inference_mode()
    def run(rows: Sequence[bytes]) -> Batch:
        x = np.stack([np.frombuffer(row, dtype=np.float32) for row in rows])  # x: [rows, 128]
        result: Batch = module(torch.from_numpy(x)).numpy()
        return result

    return run


def load_text() -> Callable[[Sequence[bytes]], Batch]:
    """A text -> its embedding of 384 FP32 values."""
    source = MiniLM()
    module = source.build()

    @torch.inference_mode()
    def run(rows: Sequence[bytes]) -> Batch:
        tensors = source.preprocess({"text": np.array(list(rows), dtype=object)})
        # ids, mask: [rows, tokens]
        result: Batch = module(*(torch.from_numpy(array) for array in tensors.values())).numpy()
        return result

    return run


def row_of(value: object) -> bytes:
    """A row from JSON: a list of numbers, or a text."""
    return value.encode() if isinstance(value, str) else np.array(value, dtype=np.float32).tobytes()


if __name__ == "__main__":
    rows = [row.encode("latin-1") for row in json.load(sys.stdin)]
    print(json.dumps(load()(rows)[0].tolist()))
