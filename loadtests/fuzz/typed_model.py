"""A model with an input of each kind: texts, flags, whole numbers, halves, a free dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.models.source import ModelSource
from serving.tensors import Signature, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch


class Typed(ModelSource):
    """Gives one value per row."""

    signature = Signature(
        inputs=(
            TensorSpec("text", "BYTES", (-1,)),
            TensorSpec("flags", "BOOL", (-1, 2)),
            TensorSpec("count", "INT64", (-1,)),
            TensorSpec("half", "FP16", (-1, 2)),
            TensorSpec("free", "FP32", (-1, -1)),
        ),
        outputs=(TensorSpec("sum", "FP32", (-1, 1), kind="regression"),),
    )

    def build(self) -> torch.nn.Module:
        """The identity."""
        import torch  # noqa: PLC0415  The gateway stays without torch.

        return torch.nn.Identity().eval()

    def preprocess(self, inputs: Tensors) -> Tensors:
        """One number of a sensible size from all that came."""
        # text: [rows], flags: [rows, 2], count: [rows], half: [rows, 2], free: [rows, any] -> [rows, 1]
        lengths = np.array([len(text) for text in inputs["text"].ravel()], np.float64)
        wide = [inputs[name].astype(np.float64) for name in ("flags", "half", "free")]
        parts = [lengths, inputs["count"].astype(np.float64), *(array.sum(axis=1) for array in wide)]
        return {"sum": np.tanh(sum(parts)).astype(np.float32)[:, None]}

    def examples(self) -> Tensors:
        """Two rows."""
        return {
            "text": np.array([b"halftone", "Halbton ä".encode()], object),
            "flags": np.array([[True, False], [False, True]]),
            "count": np.array([2**62, -1]),
            "half": np.array([[0.5, 1.5], [-2.0, 65504.0]], np.float16),
            "free": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32),
        }
