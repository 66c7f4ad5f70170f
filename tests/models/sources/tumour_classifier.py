"""A small classifier of real data that FP16 ruins while every output stays finite.

Its front divides each row by its length. The squares of most rows' values overflow FP16, so the length
is infinite, the row becomes zero and every answer the same one. The data are the 569 tumours of the
Wisconsin diagnostic breast cancer set (30 measures each, malignant or benign), as scikit-learn packages them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from serving.models.loading import package_directory
from serving.tensors import Array

FEATURES = 30
CLASSES = 2
_TEST_ROWS = 171
_EPOCHS = 1000


class UnitRows(nn.Module):
    """Each row divided by its Euclidean length, as one would write it by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, features]
        return x / torch.sqrt((x * x).sum(dim=1, keepdim=True))


class TumourClassifier(nn.Module):
    """Measures [rows, 30] -> logits of malignant and benign [rows, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.front = UnitRows()
        self.hidden = nn.Linear(FEATURES, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 30]
        return self.head(torch.relu(self.hidden(self.front(x))))


@dataclass(frozen=True)
class Tumours:
    """Measures [rows, 30] as FP32, and which are benign [rows]."""

    measures: Array
    benign: Array

    def accuracy(self, logits: Array) -> float:
        """The share of right answers."""
        return float((logits.argmax(axis=1) == self.benign).mean())


def build() -> nn.Module:
    """The network, untrained: `train` writes the weights that go with it."""
    return TumourClassifier().eval()


def tumours() -> tuple[Tumours, Tumours]:
    """Rows to train with, and 171 rows to test with, drawn with a fixed seed."""
    path = package_directory("sklearn", "scikit-learn") / "datasets" / "data" / "breast_cancer.csv"
    table = np.loadtxt(path, delimiter=",", skiprows=1)
    table = np.random.default_rng(0).permutation(table)
    parts = (table[_TEST_ROWS:], table[:_TEST_ROWS])
    train_part, test_part = (
        Tumours(part[:, :FEATURES].astype(np.float32), part[:, FEATURES].astype(int)) for part in parts
    )
    return train_part, test_part


def train(weights: Path) -> None:
    """Train at FP32 with a fixed seed, a second or two, and write a safetensors file."""
    rows, _ = tumours()
    measures, benign = torch.from_numpy(rows.measures), torch.from_numpy(rows.benign)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = TumourClassifier().train()
        optimiser = torch.optim.Adam(network.parameters(), lr=2e-2)
        for _ in range(_EPOCHS):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(measures), benign).backward()
            optimiser.step()
    save_file(network.state_dict(), weights)
