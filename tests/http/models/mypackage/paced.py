"""A model of known speed: a batch takes its time, whatever the machine and the precision."""

import time

import torch

SECONDS_PER_BATCH = 0.02
SLOW_SECONDS_PER_BATCH = 0.1


class Paced(torch.nn.Module):
    """Returns a third of its input, which tells FP16 from FP32."""

    def __init__(self, seconds_per_batch: float) -> None:
        super().__init__()
        self.seconds_per_batch = seconds_per_batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        time.sleep(self.seconds_per_batch)
        return x / 3


def build() -> torch.nn.Module:
    """The module that the configuration names."""
    return Paced(SECONDS_PER_BATCH)


def build_slow() -> torch.nn.Module:
    """One that clients in Python can ask for ten times as much as it gives."""
    return Paced(SLOW_SECONDS_PER_BATCH)
