"""How fast a tier's queue drains: from what the last batches took, and how long none has come back."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: What a batch's rows and seconds keep with each newer batch: the last few count.
_FADING = 0.7
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1, 60


@dataclass(slots=True)
class DrainRate:
    """Rows that one tier answers in a second.

    Rows and seconds fade each by themselves, so that a batch counts by the time it took: when a
    tier becomes slow, its first slow batches outweigh the many fast ones before them.
    """

    _rows: float = 0.0
    _seconds: float = 0.0
    _last_back_s: float = -math.inf

    def note(self, rows: int, seconds: float, now_s: float) -> None:
        """A batch came back: it took `seconds` of the tier's time. `now_s` is on the loop's clock."""
        self._rows = _FADING * self._rows + rows
        self._seconds = _FADING * self._seconds + max(seconds, 1e-6)
        self._last_back_s = now_s

    def retry_after_s(self, queue_rows: int, inflight_rows: int, now_s: float) -> int:
        """Seconds until the queue would be empty, between 1 s and a minute; 1 when nothing is known.

        Args:
            queue_rows: waiting.
            inflight_rows: sent and not yet back. While none comes back, these are the most that
                the tier can have answered since: a tier that hangs is not taken for a fast one.
            now_s: on the loop's clock.
        """
        if not self._seconds:
            return MIN_RETRY_AFTER_S
        rows_per_s = self._rows / self._seconds
        silence_s = now_s - self._last_back_s
        if inflight_rows and silence_s > 0:
            rows_per_s = min(rows_per_s, inflight_rows / silence_s)
        wait_s = math.ceil(queue_rows / rows_per_s)
        return max(MIN_RETRY_AFTER_S, min(MAX_RETRY_AFTER_S, wait_s))
