"""A model that takes its time, so that tests can look while it computes."""

import time

import torch

SECONDS_PER_BATCH = 1.0


class Slow(torch.nn.Module):
    """Returns its input after a while."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        time.sleep(SECONDS_PER_BATCH)
        return x * 1


def build() -> torch.nn.Module:
    """The module that the configuration names."""
    return Slow()
