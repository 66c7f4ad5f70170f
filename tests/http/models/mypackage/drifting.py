"""A model whose FP16 tier goes wrong when a test says so, as a driver's update might make it.

The file that `HALFTONE_TEST_DRIFT` names holds a factor: rows on the FP16 tier are off by that share of
their answer. The model's own examples are spared, else the replica's known answer would find it.
"""

import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from serving.models.source import ModelSource
from serving.tensors import Signature, Tensors, TensorSpec

DRIFT_VARIABLE = "HALFTONE_TEST_DRIFT"
FEATURES, CLASSES = 32, 8


@cache
def is_fp16_tier() -> bool:
    """Whether this process is an FP16 tier's replica: its title says so."""
    return b":fp16" in Path("/proc/self/cmdline").read_bytes()


def drift() -> float:
    """The share that answers are off by, at this moment."""
    path = os.environ.get(DRIFT_VARIABLE)
    if path is None or not is_fp16_tier() or not Path(path).exists():
        return 0.0
    return float(Path(path).read_text() or 0)


class Drifting(ModelSource):
    """Rows of features to scores. The first feature of a real row is 1, of an example 0."""

    signature = Signature(
        (TensorSpec("x", "FP32", (-1, FEATURES)),), (TensorSpec("y", "FP32", (-1, CLASSES), "logits"),)
    )

    def build(self) -> Any:
        """The module."""
        import torch  # noqa: PLC0415  Gateways stay without it.

        class Scores(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = torch.nn.Linear(FEATURES, 64)
                self.head = torch.nn.Linear(64, CLASSES)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                # x: [rows, features] -> [rows, classes]
                y = self.head(torch.tanh(self.body(x)))
                share = drift()
                if share == 0.0:
                    return y
                if math.isfinite(share):
                    return y * (1 + share * x[:, :1])
                return torch.where(x[:, :1] > 0, torch.full_like(y, math.nan), y)

        torch.manual_seed(3)
        return Scores().eval()

    def examples(self) -> Tensors:
        """Two rows that are no real ones."""
        x = np.random.default_rng(0).standard_normal((2, FEATURES), dtype=np.float32)
        x[:, 0] = 0
        return {"x": x}


def real_rows(rows: int, seed: int = 0) -> np.ndarray:
    """Rows as a caller has them: [rows, features]."""
    x = np.random.default_rng(seed).standard_normal((rows, FEATURES), dtype=np.float32)
    x[:, 0] = 1
    return x
