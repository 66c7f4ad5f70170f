"""How long a batch waits for more rows, and how many it takes: from what batches cost lately.

The configured wait and size stay as bounds. Within them

- a batch that would only queue behind another one waits no longer than half of a batch's round
  trip: it arrives before the replica runs dry, and a fast model's rows never sit out a long wait;
- with a latency target, a batch takes as many rows as two batches can compute in that time, since
  a row that just missed a batch waits for that one and then for its own.

The time of a batch is taken to be linear in its rows, `a + b · rows`, fitted by least squares with
exponentially fading weights. Clipper (NSDI 2017, section 4.3) adapts the size to a latency target
too, by additive increase and multiplicative decrease; a fit needs no batch that misses the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Weight that a batch keeps with each newer one: about the last 30 count.
_FADING = 0.97
#: Below this spread of rows (variance) a slope would be noise.
_MIN_VARIANCE = 0.01


@dataclass(slots=True)
class Pacer:
    """One tier's measured batches."""

    max_rows: int
    max_wait_s: float
    #: For a row from its arrival to its answer; None: throughput is all that counts.
    target_s: float | None = None
    _weight: float = 0.0
    _rows: float = 0.0
    _seconds: float = 0.0
    _rows_rows: float = 0.0
    _rows_seconds: float = 0.0
    _round_trip_s: float = 0.0

    def note(self, rows: int, compute_s: float, round_trip_s: float) -> None:
        """A batch came back.

        Args:
            rows: of the batch.
            compute_s: on its device.
            round_trip_s: from the gateway's call to the reply, `compute_s` within it.
        """
        keep = _FADING if self._weight else 0.0
        self._weight = keep * self._weight + 1
        self._rows = keep * self._rows + rows
        self._seconds = keep * self._seconds + compute_s
        self._rows_rows = keep * self._rows_rows + rows * rows
        self._rows_seconds = keep * self._rows_seconds + rows * compute_s
        newest = max(1 - _FADING, 1 / self._weight)
        self._round_trip_s += newest * (round_trip_s - self._round_trip_s)

    @property
    def wait_s(self) -> float:
        """How long a batch waits for more rows while every replica computes."""
        if not self._weight:
            return self.max_wait_s
        return min(self.max_wait_s, self._round_trip_s / 2)

    @property
    def rows(self) -> int:
        """How many rows a batch may take."""
        if self.target_s is None or not self._weight:
            return self.max_rows
        fixed_s, per_row_s = self.cost()
        if per_row_s <= 0:
            return self.max_rows
        # Half of the time for the batch that is computing, half for the row's own.
        affordable = (self.target_s / 2 - fixed_s) / per_row_s
        return max(1, math.floor(min(self.max_rows, affordable)))

    def cost(self) -> tuple[float, float]:
        """Seconds of any batch, and seconds of each row in it."""
        if not self._weight:
            return 0.0, 0.0
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_rows / self._weight - rows * rows
        if variance < _MIN_VARIANCE:
            return 0.0, seconds / rows
        slope = (self._rows_seconds / self._weight - rows * seconds) / variance
        slope = min(max(slope, 0.0), seconds / rows)  # Neither part is negative.
        return seconds - slope * rows, slope
