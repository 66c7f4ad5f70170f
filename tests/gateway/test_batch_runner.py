"""A batch whose computation fails: who is to blame, and that nobody else pays."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from serving.errors import InternalError, ModelError, Quarantined, TierLost
from serving.gateway.batch_runner import ALONE_RETRY_S, BatchRunner
from serving.gateway.pending import Pending, Slice
from serving.gateway.quarantine import Quarantine
from serving.gateway.tier_client import BatchResult
from serving.tensors import Tensors

Run = Callable[[Callable[[], Any]], Any]


class Recorded:
    """What was reported."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.elements: list[tuple[int, int]] = []

    def batch(self, rows: int, compute_s: float) -> None:
        """A batch came back."""
        self.batches.append(rows)

    def padded(self, elements: int, padding: int) -> None:
        """A batch was made."""
        self.elements.append((elements, padding))


class Tier:
    """Doubles rows. `fault` says what happens to a batch instead."""

    def __init__(self) -> None:
        self.fault: Callable[[set[float], bool], Exception | None] = lambda *_: None
        self.batches: list[list[float]] = []

    async def run(self, batch: Tensors, *, deadline_s: float, is_suspect: bool = False) -> BatchResult:
        """Compute."""
        values = batch["x"].ravel().tolist()
        self.batches.append(values)
        await asyncio.sleep(0.01)
        if (fault := self.fault(set(values), is_suspect)) is not None:
            raise fault
        return BatchResult({"y": batch["x"] * 2}, 0.005)


class Bench:
    """A runner, and requests of one row each with the values 0, 1, 2, ..."""

    def __init__(self, rows: int) -> None:
        loop = asyncio.get_running_loop()
        self.tier = Tier()
        self.recorded = Recorded()
        self.quarantine = Quarantine(loop.time)
        self.noted: list[tuple[int, float, float]] = []
        collate = lambda parts: {"x": np.concatenate([part["x"] for part in parts])}  # noqa: E731
        self.runner = BatchRunner(
            self.tier,  # type: ignore[arg-type]  # No more of it is used.
            self.recorded,
            collate,
            self.quarantine,
            lambda *note: self.noted.append(note),
        )
        self.requests = [
            Pending(row, 1, 4, None, 0.0, loop.time() + 60, 0.0, loop.create_future())
            for row in ({"x": np.array([[value]], np.float32)} for value in range(rows))
        ]

    async def compute(self) -> list[Any]:
        """Each request's answer, or the error that it got."""
        await self.runner.compute([Slice(request, 0, 1) for request in self.requests])
        outcomes = await asyncio.gather(*(request.done for request in self.requests), return_exceptions=True)
        return [one if isinstance(one, BaseException) else float(one["y"][0, 0]) for one in outcomes]


def test_a_batch_that_comes_back(run_virtually: Run) -> None:
    """Every request gets its rows, and the time is told."""

    async def scenario() -> None:
        bench = Bench(3)
        assert await bench.compute() == [0.0, 2.0, 4.0]
        assert bench.recorded.batches == [3]
        assert bench.recorded.elements == [(3, 0)]
        assert bench.noted == [(3, 0.005, pytest.approx(0.01))]

    run_virtually(scenario)


def test_the_row_that_the_model_raises_for_is_found_by_halves(run_virtually: Run) -> None:
    """It alone gets the error."""

    async def scenario() -> None:
        bench = Bench(8)
        bench.tier.fault = lambda values, _: ModelError("raised") if 5 in values else None
        outcomes = await bench.compute()
        assert isinstance(outcomes.pop(5), ModelError)
        assert outcomes == [0.0, 2.0, 4.0, 6.0, 8.0, 12.0, 14.0]
        assert [len(batch) for batch in bench.tier.batches] == [8, 4, 4, 2, 1, 1, 2]

    run_virtually(scenario)


def test_the_row_that_ends_its_replica_is_quarantined(run_virtually: Run) -> None:
    """Found one by one, since each try may cost a replica."""

    async def scenario() -> None:
        bench = Bench(4)

        def fault(values: set[float], is_suspect: bool) -> Exception | None:
            if 2 not in values:
                return None
            lost = TierLost("its replica ended")
            lost.calls_lost = lost.replicas_lost = 1 if is_suspect else 2
            return lost

        bench.tier.fault = fault
        outcomes = await bench.compute()
        assert isinstance(outcomes.pop(2), Quarantined)
        assert outcomes == [0.0, 2.0, 6.0]
        assert [len(batch) for batch in bench.tier.batches] == [4, 1, 1, 1, 1]
        with pytest.raises(Quarantined):
            bench.quarantine.check(bench.requests[2].tensors)
        bench.quarantine.check(bench.requests[1].tensors)

    run_virtually(scenario)


def test_a_suspect_waits_until_a_replica_takes_it(run_virtually: Run) -> None:
    """Refusals prove nothing against it."""

    async def scenario() -> None:
        bench = Bench(1)
        loop = asyncio.get_running_loop()
        healed_s = loop.time() + 5

        def fault(_: set[float], is_suspect: bool) -> Exception | None:
            lost = TierLost("no replica is connected")
            if not is_suspect:
                lost.calls_lost = 1
            return lost if loop.time() < healed_s else None

        bench.tier.fault = fault
        assert await bench.compute() == [0.0]
        assert healed_s <= loop.time() < healed_s + 2 * ALONE_RETRY_S

    run_virtually(scenario)


def test_a_fault_in_the_search_fails_all_that_wait(run_virtually: Run) -> None:
    """At once, rather than when their time runs out."""

    async def scenario() -> None:
        bench = Bench(2)

        def fault(_: set[float], is_suspect: bool) -> Exception | None:
            if is_suspect:
                return RuntimeError("ours")
            lost = TierLost("its replica ended")
            lost.calls_lost = lost.replicas_lost = 1
            return lost

        bench.tier.fault = fault
        assert [type(outcome) for outcome in await bench.compute()] == [InternalError, InternalError]

    run_virtually(scenario)
