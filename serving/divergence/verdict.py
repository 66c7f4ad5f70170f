"""Verdicts: a row's figures as pass, warn or fail.

The ladder is that of the accuracy checker of Huawei's msprobe (Ascend/mstt, msprobe,
07.accuracy_checker_PyTorch) for FP16 and BF16: cosine at most 0.99 fails; a largest absolute error
below 0.001 passes; otherwise 1 % of elements off by more than 1 % fails, and 0.1 % of elements off
by more than 0.1 % warns. It was made for single operators: whole models want thresholds of their
own, so each can be configured. Three rungs are ours: NaN or infinity on one side only fails; a
largest element that changed warns; and probabilities pass by absolute error only where the largest
one is still the same, since all of them are small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.divergence.comparators import Divergence

PASS, WARN, FAIL = 0, 1, 2
NAMES = ("pass", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The ladder's rungs."""

    cosine: float = 0.99
    max_abs: float = 1e-3
    share_1e2: float = 0.01
    share_1e3: float = 0.001


def verdicts(divergence: Divergence, thresholds: Thresholds) -> NDArray[np.int8]:
    """[rows]: `PASS`, `WARN` or `FAIL`. NaN figures decide nothing."""
    figures = divergence.figures
    turned = figures["cosine_distance"] >= 1 - thresholds.cosine
    small = figures["max_abs"] < thresholds.max_abs
    flipped = np.zeros(divergence.rows, bool) if divergence.top1 is None else ~divergence.top1
    failed = turned | (~(small & ~flipped) & (figures["share_1e2"] >= thresholds.share_1e2))
    warned = flipped | (~small & (figures["share_1e3"] >= thresholds.share_1e3))
    found = np.where(warned, WARN, PASS)
    found[failed | divergence.nonfinite] = FAIL
    return found.astype(np.int8)
