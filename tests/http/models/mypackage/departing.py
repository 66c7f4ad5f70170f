"""Models whose own code computes otherwise than their tier promises."""

import torch


class Lowered(torch.nn.Module):
    """A layer at BF16 behind casts: FP32 in, FP32 out, and no parameter that a conversion sees."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.nn.Linear(2, 2).bfloat16().requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        return self.hidden[0](x.bfloat16()).float()


class Unconverted(torch.nn.Module):
    """A layer in a plain list, which stays FP32 whatever its tier is."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.nn.Linear(2, 2).requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        return self.hidden[0](x)


class LoweredLater(torch.nn.Module):
    """Goes over to BF16 once it has seen a 13."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.dtype = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        if bool((x == 13).any()):
            self.dtype = torch.bfloat16
        weight = self.layer.weight.to(self.dtype)
        return torch.nn.functional.linear(x.to(self.dtype), weight).float()


def lowered() -> torch.nn.Module:
    """The hidden BF16 layer."""
    return Lowered()


def unconverted() -> torch.nn.Module:
    """The hidden FP32 layer."""
    return Unconverted()


def lowered_later() -> torch.nn.Module:
    """The turncoat."""
    return LoweredLater()


def flips_a_switch() -> torch.nn.Module:
    """An honest layer, whose builder permits BF16 in all matrix products."""
    torch.set_float32_matmul_precision("medium")
    return torch.nn.Linear(2, 2)
