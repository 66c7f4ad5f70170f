"""Quantiles of what was measured lately, with a confidence bound for how little that may be."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95


class Window:
    """The newest figures of one series."""

    __slots__ = ("_count", "_sorted", "_values")

    def __init__(self, size: int) -> None:
        self._values = np.zeros(size)
        self._count = 0
        #: The figures in ascending order, until one is added.
        self._sorted: NDArray[np.float64] | None = None

    @property
    def samples(self) -> int:
        """Figures in the window."""
        return min(self._count, len(self._values))

    def extend(self, values: NDArray[np.float64]) -> None:
        """Add figures; the oldest make room."""
        values = values[-len(self._values) :]
        places = (self._count + np.arange(len(values))) % len(self._values)
        self._values[places] = values
        self._count += len(values)
        self._sorted = None

    def clear(self) -> None:
        """Forget all of them."""
        self._count = 0
        self._sorted = None

    def quantile(self, share: float) -> float:
        """The smallest figure that at least this share of figures does not exceed; NaN without any."""
        return self._ordered(max(1, math.ceil(share * self.samples - 1e-9)))

    def upper_bound(self, share: float) -> float:
        """What the quantile of the traffic does not exceed, with `CONFIDENCE`; infinity if unknown.

        A distribution-free bound: the k-th smallest of n figures is above the quantile q with the
        probability that fewer than k of n fall below it, Bin(n, q)(k - 1) (Hahn and Meeker,
        Statistical Intervals, section 5.4). For q = 0.99 it takes 299 figures.
        """
        place = _bound_place(self.samples, share)
        return math.inf if place > self.samples else self._ordered(place)

    def _ordered(self, place: int) -> float:
        """The `place`-th smallest figure, counted from 1."""
        if self.samples == 0:
            return math.nan
        if self._sorted is None:
            self._sorted = np.sort(self._values[: self.samples])
        return float(self._sorted[place - 1])


@lru_cache(maxsize=4096)
def _bound_place(samples: int, share: float) -> int:
    """The smallest k with P(Bin(n, q) <= k - 1) >= `CONFIDENCE`; n + 1 where there is none."""
    if samples == 0:
        return 1
    below = np.arange(samples + 1)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, samples + 1)))))
    log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
    chances = np.exp(log_choose + below * math.log(share) + (samples - below) * math.log1p(-share))
    reached = np.nonzero(np.cumsum(chances)[:-1] >= CONFIDENCE)[0]
    return int(reached[0]) + 1 if len(reached) else samples + 1
