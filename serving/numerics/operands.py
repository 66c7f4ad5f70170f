"""`Operands`: rounding what goes into an operator, and each weight only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Operands:
    """FP32 operands, rounded to copies. Other values pass.

    A rounded weight is kept until the weight is written to in place; a weight must not be
    changed through ``.data`` once it was used, which no version counts.

    Args:
        rounding: FP32 tensor -> its rounded copy.
    """

    def __init__(self, rounding: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._rounding = rounding
        #: id of a parameter -> itself, its version and its rounded copy. That the parameter is
        #: held here keeps its id from being given to another.
        self._weights: dict[int, tuple[nn.Parameter, int, torch.Tensor]] = {}

    def rounded(self, value: Any) -> Any:
        """`value`, if it is an FP32 tensor or a list that holds some: rounded."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.rounded(part) for part in value)
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return value
        if not isinstance(value, nn.Parameter) or value.is_inference():
            return self._rounding(value)
        version = value._version  # noqa: SLF001 - torch's count of in-place writes
        known = self._weights.get(id(value))
        if known is None or known[1] != version:
            known = self._weights[id(value)] = (value, version, self._rounding(value.detach()))
        return known[2]
