"""The budget of one tier: how much divergence an operator tolerates before traffic leaves it.

::

               quantile over the limit                  well within it, after the cooldown
    serving ─────────────────────────────▶ tripped ────────────────────────────────────────▶ probing
       ▲                                      ▲                                                 │
       │                                      └───────────────── over the limit ────────────────┤
       └──────────────────────────────────────────────── within the limit ─────────────────────┘

Every arrow needs `min_samples` rows that were compared since the last one, but for the first, whose
window slides. Recovery asks for less divergence than the limit (`recover_ratio`), so that a tier
whose quantile lies at the limit trips once and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from serving.divergence.quantiles import Window

BudgetState = Literal["serving", "tripped", "probing"]
STATES: tuple[BudgetState, ...] = get_args(BudgetState)


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """What an operator tolerates."""

    metric: str
    limit: float
    #: Of the rows' figures, this one must stay within the limit.
    quantile: float
    window: int
    min_samples: int
    recover_ratio: float
    cooldown_s: float


class TierBudget:
    """One tier's state."""

    def __init__(self, rule: BudgetRule, clock: Callable[[], float]) -> None:
        self.rule = rule
        self.state: BudgetState = "serving"
        #: Why it is in this state, for operators.
        self.reason = "no row has been compared yet"
        #: Tripped by hand: only a person resets it.
        self.is_held = False
        self._clock = clock
        self._since_s = clock()
        self._window = Window(rule.window)

    @property
    def samples(self) -> int:
        """Rows in the window."""
        return self._window.samples

    @property
    def measured(self) -> float:
        """The quantile over the window; NaN without rows."""
        return self._window.quantile(self.rule.quantile)

    @property
    def ratio(self) -> float:
        """The quantile as a share of the limit; NaN without rows."""
        return self.measured / self.rule.limit

    def add(self, figures: NDArray[np.float64]) -> BudgetState | None:
        """Take rows' figures, infinity for one that cannot be compared. Returns a new state, if any."""
        if len(figures) == 0:
            return None
        self._window.extend(figures)
        if self.is_held or self.samples < self.rule.min_samples:
            return None
        return self._judge()

    def _judge(self) -> BudgetState | None:
        measured, limit = self.measured, self.rule.limit
        if self.state != "tripped" and measured > limit:
            return self._enter("tripped", self._sentence("over"))
        if self.state == "probing":
            return self._enter("serving", self._sentence("within"))
        has_cooled = self._clock() - self._since_s >= self.rule.cooldown_s
        if self.state == "tripped" and has_cooled and measured <= limit * self.rule.recover_ratio:
            return self._enter("probing", self._sentence("well within"))
        if self.state == "serving":
            self.reason = self._sentence("within")
        return None

    def _sentence(self, relation: str) -> str:
        rule = self.rule
        return (
            f"{rule.metric} at quantile {rule.quantile:g} is {self.measured:.3g}, {relation} the budget of "
            f"{rule.limit:g}, over {self.samples} rows"
        )

    def trip(self, reason: str) -> None:
        """By hand: traffic leaves the tier until it is reset."""
        self.is_held = True
        self._enter("tripped", reason)

    def reset(self, reason: str) -> None:
        """By hand: the tier serves again, and its window starts anew."""
        self.is_held = False
        self._enter("serving", reason)

    def restore(self, state: BudgetState, is_held: bool, reason: str) -> None:
        """Take over what another process remembers."""
        self.is_held = is_held
        self._enter(state, reason)

    def _enter(self, state: BudgetState, reason: str) -> BudgetState:
        # What was measured on the way here says nothing about what comes.
        self.state, self.reason, self._since_s = state, reason, self._clock()
        self._window.clear()
        return state
