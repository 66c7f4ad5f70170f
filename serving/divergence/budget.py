"""The budget of one tier: how much divergence an operator tolerates before traffic leaves it.

::

               quantile over the limit                  well within it, after the cooldown
    serving ─────────────────────────────▶ tripped ────────────────────────────────────────▶ probing
       ▲                                      ▲                                                 │
       │                                      └───────────────── over the limit ────────────────┤
       └──────────────────────────────────────────────── within the limit ─────────────────────┘

Every arrow needs `min_samples` rows that were compared since the last one, but for the first, whose
window slides. Recovery asks for less divergence than the limit (`recover_ratio`), so that a tier
whose quantile lies at the limit trips once and stays. Quantiles of a window scatter all the same: a
tier that relapses, tripping within `RELAPSE_COOLDOWNS` cooldowns of its last recovery, has to cool
twice as long as the last time, as Envoy's outlier detection lengthens its ejections.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from serving.divergence.quantiles import Window

BudgetState = Literal["serving", "tripped", "probing"]
STATES: tuple[BudgetState, ...] = get_args(BudgetState)

#: A trip so many cooldowns after the recovery is no relapse.
RELAPSE_COOLDOWNS = 4
#: The longest cooldown, in those of the rule: 32 minutes of the default's 30 s.
MAX_COOLDOWNS = 64


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
        #: The quantile that decided last.
        self._judged = math.nan
        #: Of the last trip, and when the tier began to serve after it.
        self._cooldown_s = 0.0
        self._recovered_s = -math.inf

    @property
    def samples(self) -> int:
        """Rows in the window."""
        return self._window.samples

    @property
    def measured(self) -> float:
        """The quantile over the window; while that is empty, the one that decided last; NaN before any."""
        return self._window.quantile(self.rule.quantile) if self.samples else self._judged

    @property
    def ratio(self) -> float:
        """`measured` as a share of the limit."""
        return self.measured / self.rule.limit

    def add(self, figures: NDArray[np.float64]) -> BudgetState | None:
        """Take rows' figures, infinity for one that cannot be compared. Returns a new state, if any."""
        if len(figures) == 0:
            return None
        self._window.extend(figures)
        if self.is_held:
            return None
        if self.samples < self.rule.min_samples:
            if self.state == "serving":
                self.reason = f"{self.samples} of {self.rule.min_samples} rows that it takes are compared"
            return None
        return self._judge()

    def _judge(self) -> BudgetState | None:
        measured = self._judged = self.measured
        limit = self.rule.limit
        if self.state != "tripped" and measured > limit:
            self._cooldown_s = self._next_cooldown_s()
            return self._enter("tripped", self._sentence("over"))
        if self.state == "probing":
            self._recovered_s = self._clock()
            return self._enter("serving", self._sentence("within"))
        has_cooled = self._clock() - self._since_s >= self._cooldown_s
        if self.state == "tripped" and has_cooled and measured <= limit * self.rule.recover_ratio:
            return self._enter("probing", self._sentence("well within"))
        if self.state == "serving":
            self.reason = self._sentence("within")
        return None

    def _next_cooldown_s(self) -> float:
        shortest_s = self.rule.cooldown_s
        served_s = self._clock() - self._recovered_s if self.state == "serving" else 0.0
        if served_s > RELAPSE_COOLDOWNS * self._cooldown_s:
            return shortest_s
        return min(max(2 * self._cooldown_s, shortest_s), MAX_COOLDOWNS * shortest_s)

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
        self._judged, self._cooldown_s = math.nan, 0.0
        self._enter("serving", reason)

    def restore(self, state: BudgetState, is_held: bool, reason: str) -> None:
        """Take over what another process remembers."""
        self.is_held = is_held
        self._cooldown_s = self.rule.cooldown_s
        self._enter(state, reason)

    def _enter(self, state: BudgetState, reason: str) -> BudgetState:
        # What was measured on the way here says nothing about what comes.
        self.state, self.reason, self._since_s = state, reason, self._clock()
        self._window.clear()
        return state
