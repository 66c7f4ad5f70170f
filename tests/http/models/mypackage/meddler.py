"""A model whose code lowers a process-wide precision switch when it sees a 13."""

import torch


class Meddler(torch.nn.Module):
    """Returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        if bool((x == 13).any()):
            torch.set_float32_matmul_precision("medium")
        return x * 1


def build() -> torch.nn.Module:
    """The module that the configuration names."""
    return Meddler()
