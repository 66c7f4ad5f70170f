"""Models with outputs that comparison must bear: integers, none at all, huge ones, and changing shapes."""

import torch

HUGE_ELEMENTS = 2_621_440  # 10 MiB of FP32


class Labels(torch.nn.Module):
    """The largest element's index, and the index as a wide integer."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # x: [rows, n] -> [rows], [rows, 1]
        index = x.argmax(dim=1)
        return index, (index + 2**40).unsqueeze(1)


class Empty(torch.nn.Module):
    """Rows of nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, n] -> [rows, 0]
        return x[:, :0]


class Huge(torch.nn.Module):
    """Rows of 10 MiB."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, n] -> [rows, HUGE_ELEMENTS]
        return x[:, :1].expand(-1, HUGE_ELEMENTS) * 0.1


class Square(torch.nn.Module):
    """As many elements a row as the batch has rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, n] -> [rows, rows]
        return x[:, :1].expand(-1, len(x)) * 1


def labels() -> torch.nn.Module:
    """The module that the configuration names."""
    return Labels()


def empty() -> torch.nn.Module:
    """The module that the configuration names."""
    return Empty()


def huge() -> torch.nn.Module:
    """The module that the configuration names."""
    return Huge()


def square() -> torch.nn.Module:
    """The module that the configuration names."""
    return Square()
