"""Responses that are written one right after another."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

_log = logging.getLogger(__name__)


class Writer(Protocol):
    """A connection with something to write."""

    def flush(self) -> None:
        """Write it now."""


class WriteBatch:
    """Writers that wait until the loop has made all the responses that it can make now.

    A batch of rows answers many clients at once. Written as each response is made, the first write
    wakes the receiving process, which goes back to sleep before the next one, and every write pays
    for another wake-up. Written together they pay for one.
    """

    def __init__(self) -> None:
        self._waiting: list[Writer] = []

    def add(self, writer: Writer) -> None:
        """Have it flushed once, soon."""
        if not self._waiting:
            # After the tasks that are ready by now: those of the other rows of a batch.
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(writer)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            try:
                writer.flush()
            except Exception:  # It must not take those behind it along.
                _log.exception("a response was not written")
