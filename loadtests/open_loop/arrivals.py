"""When requests are due: a Poisson process, at one rate or with bursts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bursts:
    """Every `period_s`, for `share` of it, the rate is `factor` times the mean; less in between.

    Raises:
        ValueError: the bursts alone would exceed the mean rate, or a figure is out of range.
    """

    factor: float
    share: float
    period_s: float

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.share < 1 and self.period_s > 0):
            raise ValueError("bursts need a factor of 1 or more, a share between 0 and 1, a period above 0")
        if self.factor * self.share > 1:
            raise ValueError(
                f"bursts of {self.factor:g} times the rate for {self.share:g} of the time exceed the mean"
            )

    @property
    def rate_between(self) -> float:
        """The rate between bursts, as a share of the mean rate."""
        return (1 - self.factor * self.share) / (1 - self.share)


def arrivals(
    rate_per_s: float, duration_s: float, random: np.random.Generator, bursts: Bursts | None = None
) -> FloatArray:
    """Times in seconds from the start, ascending, of a Poisson process with that mean rate.

    Given their number, the arrivals of a homogeneous process are independent and uniform; a rate that
    changes with time is the same process on a clock that runs with the cumulative rate.
    """
    count = random.poisson(rate_per_s * duration_s)
    uniform = np.sort(random.uniform(0.0, duration_s, count))
    if bursts is None:
        return uniform
    # Clock and time of each change of rate; both ascend. Between bursts the rate may be 0.
    periods = np.arange(int(np.ceil(duration_s / bursts.period_s)) + 1) * bursts.period_s
    ends = periods + bursts.share * bursts.period_s
    times = np.stack([periods, ends], axis=1).ravel()
    clock = np.stack([periods, periods + (bursts.factor * bursts.share) * bursts.period_s], axis=1).ravel()
    changed = np.interp(uniform, clock, times)
    return changed[changed < duration_s]
