"""Whether two answers of one model to the same rows are the same."""

from __future__ import annotations

import math
import sys

import numpy as np

from serving.tensors import Array

#: How far two answers of the same kernels to the same batch may lie apart, in relative L2. They
#: repeat to the bit on most devices, and are garbage on a broken one.
REPEAT_TOLERANCE = 1e-3


def relative_l2(found: Array, expected: Array) -> float:
    """‖found - expected‖₂ / ‖expected‖₂; of other shapes, infinite."""
    if found.shape != expected.shape:
        return math.inf
    wide = expected.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Infinity less infinity is NaN, which is within no tolerance.
        return float(np.linalg.norm(found - wide) / max(float(np.linalg.norm(wide)), sys.float_info.min))


def repeats(found: Array, expected: Array) -> bool:
    """Whether an answer came again: finite values within `REPEAT_TOLERANCE`, others equal.

    An FP16 answer may hold infinities, which have no distance.
    """
    if found.shape != expected.shape:
        return False
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=expected.dtype.kind == "f"):
        return False
    return relative_l2(found[finite], expected[finite]) <= REPEAT_TOLERANCE
