"""`Outcome`: what one run measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtests.open_loop.arrivals import FloatArray
from loadtests.open_loop.connection import LOST, UNANSWERED, UNREADABLE

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
#: A generator that sends later than this after a request was due no longer shows the server's times.
MAX_LAG_MS = 5.0
_FAILURES = {LOST: "connection lost", UNREADABLE: "reply without a length", UNANSWERED: "no answer"}


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Times in seconds from the start of the run, one entry per request; NaN: it did not happen.

    Attributes:
        due_s, sent_s, done_s: when a request was due, was sent, was answered.
        status: HTTP's, or why there is none.
        waited: whether all connections were taken when it was due.
        violations: answers by a tier that the request had not declared, nor a more precise one.
        end_s: when the run was given up or complete.
        unannounced: refusals with 503 that do not say when to come back.
        refused: replies other than 2xx, by the exchange's label and the status.
    """

    due_s: FloatArray
    sent_s: FloatArray
    done_s: FloatArray
    status: NDArray[np.int64]
    waited: NDArray[np.bool_]
    violations: int
    end_s: float
    unannounced: int = 0
    refused: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def after(self, warmup_s: float) -> Outcome:
        """Without the requests that were due before that."""
        kept = self.due_s >= warmup_s
        return Outcome(
            self.due_s[kept],
            self.sent_s[kept],
            self.done_s[kept],
            self.status[kept],
            self.waited[kept],
            self.violations,
            self.end_s,
            self.unannounced,
            self.refused,
        )

    @property
    def is_success(self) -> NDArray[np.bool_]:
        """Per request: answered with 2xx."""
        return (self.status >= 200) & (self.status < 300)  # noqa: PLR2004

    @property
    def latencies_s(self) -> FloatArray:
        """Exact, from when each request was due: successes, and what had no answer yet at the end.

        The latter count as answered at the end: at least that long. Refusals (503, say) do not count.
        """
        done_s = np.where(np.isnan(self.done_s), self.end_s, self.done_s)
        latencies_s: FloatArray = (done_s - self.due_s)[self.is_success | (self.status == UNANSWERED)]
        return latencies_s

    @property
    def lags_s(self) -> FloatArray:
        """How late the generator itself was, for requests that had a connection free."""
        lags = (self.sent_s - self.due_s)[~self.waited]
        return lags[~np.isnan(lags)]

    def summary(self) -> dict[str, Any]:
        """Rates per second, percentiles in ms, failures, and whether the generator kept up."""
        span_s = float(np.ptp(self.due_s)) if len(self.due_s) else 0.0
        failures = Counter(
            _FAILURES.get(status, str(status)) for status in self.status[~self.is_success].tolist()
        )
        lag_p99_ms = _percentiles_ms(self.lags_s).get("p99", 0.0)
        waited = int(self.waited.sum())
        return {
            "requests": len(self.due_s),
            # None: all were due at once.
            "offered_per_s": round(len(self.due_s) / span_s, 1) if span_s else None,
            "succeeded": int(self.is_success.sum()),
            "failures": dict(failures),
            "precision_violations": self.violations,
            "latency_ms": _percentiles_ms(self.latencies_s),
            "from_send_ms": _percentiles_ms((self.done_s - self.sent_s)[self.is_success]),
            "waited_for_a_connection": waited,
            "generator_lag_p99_ms": lag_p99_ms,
            "kept_up": waited == 0 and lag_p99_ms <= MAX_LAG_MS,
        }


def _percentiles_ms(times_s: FloatArray) -> dict[str, float]:
    if not len(times_s):
        return {}
    found = np.percentile(times_s * 1000, PERCENTILES).tolist()
    named = {
        f"p{percentile:g}": round(value, 3) for percentile, value in zip(PERCENTILES, found, strict=True)
    }
    return {**named, "max": round(float(times_s.max()) * 1000, 3)}
