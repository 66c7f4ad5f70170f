"""When a replica may compute what nobody waits for: in time that its callers leave over.

A batch that has begun cannot be interrupted, and a caller's rows that come meanwhile wait. So it is
not enough that nothing is under way: callers who wait for one another's answers leave short gaps
however busy they keep a replica. A background batch may run

- while no other batch is under way,
- where callers took less than half of the last second or so,
- and, unless they took nothing of it, only every so often: it takes a twentieth of the time at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable

#: Weighs what callers took: what was so long ago counts 1/e.
MEMORY_S = 1.0
#: The share of time from which on callers have all of it.
BUSY_SHARE = 0.5
#: Below this share nobody has called for several seconds.
UNUSED_SHARE = 0.001
#: The share of time that background batches may take beside callers.
BACKGROUND_SHARE = 0.05


class SpareTime:
    """One replica's. Times are those of its clock, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._own_batches = 0
        self._background_batches = 0
        self._share = 0.0
        self._changed_s = clock()
        self._background_began_s = 0.0
        self._next_background_s = -math.inf

    @property
    def callers_share(self) -> float:
        """The share of time that callers' batches took lately."""
        kept = math.exp(-(self._clock() - self._changed_s) / MEMORY_S)
        return self._share * kept + (1 - kept if self._own_batches else 0.0)

    def allows_background(self) -> bool:
        """Whether a background batch may begin now."""
        if self._own_batches or self._background_batches:
            return False
        share = self.callers_share
        return share < UNUSED_SHARE or (share < BUSY_SHARE and self._clock() >= self._next_background_s)

    def began(self, is_background: bool) -> None:
        """A batch is under way."""
        self._note()
        if is_background:
            self._background_batches += 1
            self._background_began_s = self._clock()
        else:
            self._own_batches += 1

    def ended(self, is_background: bool) -> None:
        """A batch is done, or was given up."""
        self._note()
        if is_background:
            self._background_batches -= 1
            took_s = self._clock() - self._background_began_s
            self._next_background_s = self._clock() + took_s * (1 / BACKGROUND_SHARE - 1)
        else:
            self._own_batches -= 1

    def _note(self) -> None:
        self._share, self._changed_s = self.callers_share, self._clock()
