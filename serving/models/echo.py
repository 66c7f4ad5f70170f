"""`Echo`: gives back what it gets. For measuring everything around a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.models.source import ModelSource
from serving.tensors import Signature, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch


class Echo(ModelSource):
    """128 FP32 values per row, in and out."""

    signature = Signature(
        inputs=(TensorSpec("x", "FP32", (-1, 128)),),
        outputs=(TensorSpec("y", "FP32", (-1, 128), kind="regression"),),
    )

    def build(self) -> torch.nn.Module:
        """The identity."""
        import torch  # noqa: PLC0415 - the gateway stays without torch

        return torch.nn.Identity().eval()

    def examples(self) -> Tensors:
        """Four rows of normally distributed values, the same every time."""
        return {"x": np.random.default_rng(0).standard_normal((4, 128), dtype=np.float32)}
