"""`layercast` storage: weights 16 bits wide in memory, widened for the time of a module's call.

Used where memory counts, on GPUs and NPUs. On a CPU `layercast` holds rounded weights in FP32:
the same values and the same results, at FP32's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class WideForward:
    """The `forward` of a module, with FP32 copies of its weights put in place while it runs.

    One pass at a time: the copies stand in the module itself. A call within the call finds
    them there and leaves them.

    Args:
        forward: the module's own.
        owned: each weight's module, its local name and the 16-bit tensor.
    """

    def __init__(
        self, forward: Callable[..., Any], owned: Iterable[tuple[nn.Module, str, torch.Tensor]]
    ) -> None:
        self._forward = forward
        self._owned = tuple(owned)
        self._running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own `forward` returns."""
        if self._running:
            return self._forward(*args, **kwargs)
        self._running = True
        try:
            for owner, name, stored in self._owned:
                setattr(owner, name, _like(stored, stored.detach().to(torch.float32)))
            return self._forward(*args, **kwargs)
        finally:
            for owner, name, stored in self._owned:
                setattr(owner, name, stored)
            self._running = False


def _like(stored: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(wide, requires_grad=False) if isinstance(stored, nn.Parameter) else wide
