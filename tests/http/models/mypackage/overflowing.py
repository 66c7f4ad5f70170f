"""Models that 16 bits cannot hold, in plain sight or hidden."""

import torch


class Squares(torch.nn.Module):
    """x², which FP16 cannot hold from 256 on and FP32 from 1.9e19 on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        return x * x


class Hidden(torch.nn.Module):
    """x² / (1 + x²): finite whatever x² became."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        squares = x * x
        return squares / (1 + squares)


class Logarithm(torch.nn.Module):
    """log x, which is minus infinity for 0 at any precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        return torch.log(x)


def squares() -> torch.nn.Module:
    """In plain sight."""
    return Squares()


def hidden() -> torch.nn.Module:
    """Behind a quotient."""
    return Hidden()


def logarithm() -> torch.nn.Module:
    """Legitimately infinite."""
    return Logarithm()
