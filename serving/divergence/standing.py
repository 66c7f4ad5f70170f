"""What is known about a tier's divergence, over all gateways: plain data, and who keeps it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serving.divergence.budget import BudgetRule, BudgetState, TierBudget
from serving.divergence.comparators import METRICS
from serving.divergence.quantiles import Window

logger = logging.getLogger("halftone.precision")

#: metric -> a figure per row, the worst of the row's outputs; infinity where they cannot be compared.
RowFigures = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One metric of one tier, over its window."""

    #: At the budget's quantile; NaN without rows.
    quantile: float
    #: What that quantile of the traffic does not exceed, with 95 % confidence; infinity if unknown.
    bound: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One tier's state and what it rests on."""

    state: BudgetState = "serving"
    reason: str = "no row has been compared yet"
    is_held: bool = False
    #: Rows in the windows.
    samples: int = 0
    #: The budget's quantile over its limit; NaN without rows.
    ratio: float = math.nan
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    #: The same metrics between two FP32 runs of the same rows.
    floor: Mapping[str, float] = field(default_factory=dict)


class TierLedger:
    """Keeps one tier's windows and budget."""

    def __init__(self, name: str, rule: BudgetRule, clock: Callable[[], float]) -> None:
        self.budget = TierBudget(rule, clock)
        self._name = name
        self._windows = {metric: Window(rule.window) for metric in METRICS}

    def add(self, figures: RowFigures) -> None:
        """Take what gateways compared."""
        for metric, values in figures.items():
            array = np.asarray(values, np.float64)
            known = array[~np.isnan(array)]
            if metric in self._windows:
                self._windows[metric].extend(known)
            if metric == self.budget.rule.metric:
                self._judge(known, is_any=len(array) > 0)

    def _judge(self, known: NDArray[np.float64], is_any: bool) -> None:
        """`known`: the budget's figures; `is_any`: whether rows were compared at all."""
        if state := self.budget.add(known):
            log = logger.warning if state == "tripped" else logger.info
            log("tier %s is %s: %s", self._name, state, self.budget.reason)
        elif is_any and not self.budget.samples and self.budget.state == "serving":
            self.budget.reason = f"{self.budget.rule.metric} applies to none of the model's outputs"

    def reset(self, reason: str) -> None:
        """By hand: the tier serves again, and nothing that was measured before counts."""
        self.budget.reset(reason)
        for window in self._windows.values():
            window.clear()

    def standing(self, floor: Mapping[str, float]) -> Standing:
        """What there is to tell."""
        share = self.budget.rule.quantile
        return Standing(
            self.budget.state,
            self.budget.reason,
            self.budget.is_held,
            max(window.samples for window in self._windows.values()),
            self.budget.ratio,
            {
                metric: Measured(window.quantile(share), window.upper_bound(share))
                for metric, window in self._windows.items()
                if window.samples
            },
            floor,
        )


class FloorLedger:
    """Keeps what the reference itself wobbles by."""

    def __init__(self, window: int, quantile: float) -> None:
        self._windows = {metric: Window(window) for metric in METRICS}
        self._quantile = quantile

    def add(self, figures: RowFigures) -> None:
        """Take what gateways compared."""
        for metric, values in figures.items():
            array = np.asarray(values, np.float64)
            self._windows[metric].extend(array[~np.isnan(array)])

    def floor(self) -> dict[str, float]:
        """Metric -> its quantile between two FP32 runs; none that was never measured."""
        return {
            metric: window.quantile(self._quantile)
            for metric, window in self._windows.items()
            if window.samples
        }
