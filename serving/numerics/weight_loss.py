"""Weights that a cast to 16 bits would lose: those that become infinite, those that become zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Share of a tensor's non-zero elements that may become zero; 1-2 % is the usual limit for FP16.
MAX_ZEROED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class WeightLoss:
    """What a cast does to one parameter or buffer."""

    #: Qualified name, as in `named_parameters()` or `named_buffers()`.
    name: str
    #: Elements that are finite in FP32 and infinite after the cast.
    to_inf: int
    #: Elements that are non-zero in FP32 and zero after the cast.
    to_zero: int
    #: Elements that are non-zero in FP32.
    nonzero: int
    #: All elements.
    total: int
    #: The largest finite magnitude in FP32.
    largest: float

    @property
    def material(self) -> bool:
        """Whether the module must not be cast: an infinity, or more than 1 % flushed to zero."""
        return self.to_inf > 0 or self.to_zero > MAX_ZEROED_SHARE * self.nonzero

    def __str__(self) -> str:
        return (
            f"{self.name}: of {self.total} values {self.to_inf} become infinite and {self.to_zero} "
            f"of {self.nonzero} non-zero ones become zero; the largest is {self.largest:g}"
        )


def weight_loss(name: str, weight: torch.Tensor, dtype: torch.dtype) -> WeightLoss | None:
    """What casting `weight` to `dtype` loses, or None if nothing.

    Args:
        name: how the result names the tensor.
        weight: any shape. Values that are infinite or NaN already are not lost by the cast.
        dtype: `torch.float16` or `torch.bfloat16`.
    """
    if not weight.is_floating_point() or weight.numel() == 0:
        return None
    # On the host: a card that saturates would cast 1e6 to 65504, and nothing would be infinite.
    weight = weight.detach().cpu()
    cast = weight.to(dtype)
    finite = torch.isfinite(weight)
    to_inf = int((finite & torch.isinf(cast)).sum())
    nonzero = weight != 0
    to_zero = int((nonzero & (cast == 0)).sum())
    if not to_inf and not to_zero:
        return None
    largest = float(weight[finite].abs().max())
    return WeightLoss(name, to_inf, to_zero, int(nonzero.sum()), weight.numel(), largest)
