"""One timer for all deadlines: each request expires in time, and none that was answered does."""

import asyncio
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gateway.expiries import Expiries
from serving.gateway.pending import Pending


def pending(deadline_s: float) -> Pending:
    """A request with nothing but a deadline."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return Pending({}, 1, 0, None, 0.0, deadline_s, 0.0, done)


async def emptied(expiries: Expiries) -> None:
    """Until none waits."""
    while len(expiries):  # noqa: ASYNC110  It tells nobody.
        await asyncio.sleep(0.001)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=20),
)
@settings(deadline=None, max_examples=30)
def test_each_expires_once_and_in_time(requests: list[tuple[int, bool]]) -> None:
    """In whatever order they were added, and whichever of them are answered meanwhile."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        expired: list[tuple[Pending, float]] = []
        expiries = Expiries(lambda request: expired.append((request, loop.time())))
        now_s = loop.time()
        waiting = [pending(now_s + after_ms / 1000) for after_ms, _ in requests]
        numbers = [expiries.add(request) for request in waiting]
        answered = [
            request for request, (_, is_answered) in zip(waiting, requests, strict=True) if is_answered
        ]
        for number, (_, is_answered) in zip(numbers, requests, strict=True):
            if is_answered:
                expiries.discard(number)
        await emptied(expiries)
        assert {id(request) for request, _ in expired} == {id(r) for r in waiting if r not in answered}
        assert len(expired) == len(waiting) - len(answered)
        for request, at_s in expired:
            assert request.deadline_s <= at_s < request.deadline_s + 0.2

    asyncio.run(run())


def test_a_nearer_deadline_is_not_held_up_by_a_farther_one() -> None:
    """Nor by one that is never."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        expiries = Expiries(lambda _: done.set())
        for after_s in (math.inf, 60.0, 0.01):
            expiries.add(pending(loop.time() + after_s))
        await asyncio.wait_for(done.wait(), 5)
        assert len(expiries) == 2

    asyncio.run(run())


def test_what_is_over_takes_no_room() -> None:
    """However far its deadline is: neither the requests nor, beyond some, the deadlines."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        expiries = Expiries(lambda _: None)
        kept = expiries.add(pending(loop.time() + 3600))
        for _ in range(10_000):
            expiries.discard(expiries.add(pending(loop.time() + 3600)))
        assert len(expiries) == 1
        assert len(expiries._heap) < 100
        expiries.discard(kept)
        expiries.discard(kept)
        assert len(expiries) == 0

    asyncio.run(run())


def test_one_timer_is_set_for_many() -> None:
    """As long as they do not come ever nearer."""

    async def run() -> int:
        loop = asyncio.get_running_loop()
        timers: list[float] = []
        set_timer = loop.call_at

        def call_at(when_s: float, *rest: Any) -> asyncio.TimerHandle:
            timers.append(when_s)
            return set_timer(when_s, *rest)

        loop.call_at = call_at  # type: ignore[method-assign]
        expiries = Expiries(lambda _: None)
        for number in range(100):
            expiries.add(pending(loop.time() + 3600 + number))
        return len(timers)

    assert asyncio.run(run()) == 1
