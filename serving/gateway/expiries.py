"""Requests whose time runs out, with one timer for all of them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from serving.gateway.pending import Pending

#: Deadlines of requests that are over stay in the heap until there are so many more of them than of others.
_MAX_STALE = 64


class Expiries:
    """Requests that wait for their answers, each until its deadline.

    Almost none is ever reached, and a timer of the loop for each would cost several times what a
    place in a heap does. All methods run on one event loop.
    """

    def __init__(self, expire: Callable[[Pending], None]) -> None:
        """`expire` is called with each request whose deadline passes; it is forgotten then."""
        self._expire = expire
        self._waiting: dict[int, Pending] = {}
        #: Deadlines, and the numbers of their requests.
        self._heap: list[tuple[float, int]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        #: When the timer fires: at the earliest deadline, or before.
        self._next_s = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def add(self, request: Pending) -> int:
        """Watch a request. Returns the number by which it is discarded."""
        number = next(self._numbers)
        self._waiting[number] = request
        heapq.heappush(self._heap, (request.deadline_s, number))
        if self._timer is None or request.deadline_s < self._next_s:
            self._set_timer()
        return number

    def discard(self, number: int) -> None:
        """It waits no longer."""
        self._waiting.pop(number, None)
        if len(self._heap) > 2 * len(self._waiting) + _MAX_STALE:
            self._heap = [each for each in self._heap if each[1] in self._waiting]
            heapq.heapify(self._heap)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_s = self._heap[0][0]
        self._timer = asyncio.get_running_loop().call_at(self._next_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        try:
            while self._heap and (self._heap[0][0] <= now_s or self._heap[0][1] not in self._waiting):
                request = self._waiting.pop(heapq.heappop(self._heap)[1], None)
                if request is not None:
                    self._expire(request)
        finally:
            if self._heap:
                self._set_timer()
