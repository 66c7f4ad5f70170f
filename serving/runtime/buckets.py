"""Batch buckets: the numbers of rows that a tier computes, so that its shapes are few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from serving.tensors import Array, Tensors, row_count


def padded_to_bucket(batch: Mapping[str, Array], buckets: Sequence[int]) -> Tensors:
    """A batch with its last row repeated up to the smallest bucket that holds it.

    A real row and not zeros: it can overflow or divide by zero no more than the batch itself.
    A batch larger than every bucket is returned as it is.

    Args:
        batch: tensors [rows, ...].
        buckets: numbers of rows, ascending.
    """
    rows = row_count(batch)
    missing = next((bucket for bucket in buckets if bucket >= rows), rows) - rows
    if rows == 0 or missing == 0:
        return dict(batch)
    return {
        name: np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) for name, array in batch.items()
    }


def cycled_rows(batch: Mapping[str, Array], rows: int, start: int = 0) -> Tensors:
    """`rows` rows of a batch, from its row `start` on, and from its first again after its last."""
    chosen = np.arange(start, start + rows) % row_count(batch)
    return {name: array[chosen] for name, array in batch.items()}
