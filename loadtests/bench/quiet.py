"""How busy the machine is with other work: a benchmark on a shared machine waits for a better moment."""

from __future__ import annotations

import time
from pathlib import Path

#: Of all cores; below this the rest is taken for noise of the system.
QUIET_SHARE = 0.15
_LOOK_S = 1.0


def wait_for_quiet(patience_s: float) -> float:
    """The share of all cores that was busy in the last second, once that is small or patience has run out."""
    give_up_s = time.monotonic() + patience_s
    while True:
        share = busy_share(_LOOK_S)
        if share <= QUIET_SHARE or time.monotonic() > give_up_s:
            return round(share, 2)


def busy_share(seconds: float) -> float:
    """Of all cores, over that time; 0 to 1."""
    before = _jiffies()
    time.sleep(seconds)
    idle, total = (after - was for after, was in zip(_jiffies(), before, strict=True))
    return 1 - idle / total if total else 0.0


def _jiffies() -> tuple[int, int]:
    """Idle (waiting for I/O included) and all time, summed over cores. See proc_stat(5)."""
    first, _, _ = Path("/proc/stat").read_text(encoding="ascii").partition("\n")
    times = [int(field) for field in first.split()[1:9]]
    return times[3] + times[4], sum(times)
