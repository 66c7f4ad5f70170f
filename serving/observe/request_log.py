"""A line for a request, at most; when there are many, for some of them, by rate."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from serving.observe.logs import FIELDS

logger = logging.getLogger("halftone.request")

#: Of answered requests, and as many of refused ones: neither hides the other.
LINES_PER_S = 10.0
#: W3C Trace Context: version, trace id, parent id, flags.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
#: A request id that may stand in an exemplar, whose labels have 128 characters together.
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,64}")


@dataclass(frozen=True, slots=True)
class Trace:
    """The caller's W3C trace context."""

    trace_id: str
    #: The header, to be passed on.
    traceparent: str


def parse_traceparent(header: str | None) -> Trace | None:
    """The caller's trace, if the header is a valid one; anything else is as if it were not there."""
    found = _TRACEPARENT.fullmatch(header) if header else None
    if found is None or header is None:
        return None
    version, trace_id, parent_id, _ = found.groups()
    if version == "ff" or not trace_id.strip("0") or not parent_id.strip("0"):
        return None
    return Trace(trace_id, header)


def exemplar_of(request_id: str, trace: Trace | None) -> dict[str, str] | None:
    """By which a bucket's request is found in logs and traces; None where its id is not plain."""
    labels = {} if trace is None else {"trace_id": trace.trace_id}
    if _PLAIN_ID.fullmatch(request_id):
        labels["request_id"] = request_id
    return labels or None


class Rate:
    """So many a second, evenly, whatever comes; cheap to ask."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._next_s = 0.0
        #: Those that were not taken since the last one that was.
        self.skipped = 0

    def take(self, now_s: float) -> bool:
        """Whether this one is taken. A burst of a second's worth is, after a pause."""
        if now_s < self._next_s:
            self.skipped += 1
            return False
        self._next_s = max(self._next_s, now_s - 1.0) + self._interval_s
        return True


class RequestLog:
    """Writes the lines."""

    def __init__(self, lines_per_s: float = LINES_PER_S) -> None:
        self._answered = Rate(lines_per_s)
        self._refused = Rate(lines_per_s)

    def wants_answer(self, now_s: float) -> bool:
        """Whether a request that begins now has a line if it is answered."""
        return self._answered.take(now_s)

    def wants_refusal(self, now_s: float) -> bool:
        """Whether a request that is refused now has a line."""
        return self._refused.take(now_s)

    def write(self, fields: Mapping[str, object], *, refused: bool) -> None:
        """The line of a request that was taken."""
        rate = self._refused if refused else self._answered
        skipped, rate.skipped = rate.skipped, 0
        own = {name: value for name, value in fields.items() if value is not None}
        if skipped:
            own["skipped"] = skipped
        logger.log(
            logging.WARNING if refused else logging.INFO,
            "refused" if refused else "answered",
            extra={FIELDS: own},
        )
