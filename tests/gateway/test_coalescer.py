"""The coalescer: what may share a batch, when a batch leaves, what a queue holds, and who gets which row.

The tier is in memory and answers when the test says so. Every row is a number of its own, and
the tier doubles it, so that a row given to the wrong request is seen.
"""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import (
    Deadline,
    InternalError,
    ModelError,
    Overloaded,
    Quarantined,
    RequestError,
    TierLost,
    TooLarge,
)
from serving.gateway.coalescer import BATCHES_PER_REPLICA, Coalescer, Limits
from serving.gateway.tier_client import ATTEMPTS, BatchResult, TierReport
from serving.models.echo import Echo
from serving.tensors import Array, Tensors

Run = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]
MAX_WAIT_S = 0.010
#: Far beyond everything that a test waits for.
LATER_S = 1000.0


def doubled(batch: Tensors) -> BatchResult:
    """What the model computes."""
    return BatchResult({"y": batch["x"] * 2}, compute_s=0.001)


@dataclass(eq=False)
class Call:
    """A batch at the tier, not answered yet."""

    rows: Array
    batch: Tensors
    answer: asyncio.Future[BatchResult]
    deadline_s: float

    def release(self) -> None:
        """Answer as the model does."""
        self.answer.set_result(doubled(self.batch))

    def fail(self, error: BaseException) -> None:
        """Raise instead."""
        self.answer.set_exception(error)


class HeldTier:
    """A tier whose batches wait until the test releases them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def run(
        self, batch: Tensors, *, deadline_s: float = math.inf, is_suspect: bool = False
    ) -> BatchResult:
        """Hold a batch."""
        assert not is_suspect
        answer = asyncio.get_running_loop().create_future()
        call = Call(batch["x"][:, 0], batch, answer, deadline_s)
        self.calls.append(call)
        return await call.answer

    async def report(self, *, with_example: bool) -> TierReport:
        """Nobody asks."""
        raise NotImplementedError

    @property
    def sizes(self) -> list[int]:
        """Rows of each batch that arrived."""
        return [len(call.rows) for call in self.calls]


@dataclass
class Recorder:
    """Every figure that the coalescer reported, in order."""

    waits_s: list[float] = field(default_factory=list)
    padding: list[tuple[int, int]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def started(self, waited_s: float) -> None:
        """A request's first row left."""
        self.waits_s.append(waited_s)

    def batch(self, rows: int, compute_s: float) -> None:
        """A batch came back."""
        assert compute_s > 0
        self.batches.append(rows)

    def padded(self, elements: int, padding: int) -> None:
        """A batch was made."""
        self.padding.append((elements, padding))


class WatchedCoalescer(Coalescer):
    """Remembers how long its queue was, and how much was under way, after each change."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.lengths: list[tuple[int, int]] = []

    def _reserve(self, rows: int, size_bytes: int = 0) -> None:
        super()._reserve(rows, size_bytes)
        self.lengths.append((self.queue_rows, self.inflight_rows))


class Bench:
    """A coalescer, its tier, and numbered rows to send through it."""

    def __init__(
        self,
        client: Any = None,
        *,
        max_rows: int = 4,
        max_queue_rows: int = 100,
        replicas: int = 1,
        max_wait_s: float = MAX_WAIT_S,
        max_queue_bytes: int = 2**20,
    ) -> None:
        self.tier = client or HeldTier()
        self.recorder = Recorder()
        self.limits = Limits(max_rows, max_wait_s, max_queue_rows, max_queue_bytes, replicas)
        source = Echo()
        self.coalescer = WatchedCoalescer(
            self.tier, self.limits, self.recorder, source.collate, source.batch_key
        )
        self._numbers = itertools.count(1)

    def tensors(self, rows: int, width: int = 1) -> Tensors:
        """Rows of new numbers. The width is the batch key."""
        numbers = np.array([next(self._numbers) for _ in range(rows)], np.float32)
        return {"x": np.repeat(numbers[:, None], width, axis=1)}

    async def infer(self, tensors: Tensors, deadline_s: float | None = None) -> Array:
        """Admit and submit, as the service does; the outputs."""
        rows, taken_bytes = len(tensors["x"]), tensors["x"].nbytes
        self.coalescer.admit(rows, taken_bytes)
        if deadline_s is None:
            deadline_s = asyncio.get_running_loop().time() + LATER_S
        outputs = await self.coalescer.submit(tensors, rows, deadline_s, admitted_bytes=taken_bytes)
        return outputs["y"]

    async def send(self, rows: int, width: int = 1, timeout_s: float = LATER_S) -> asyncio.Task[Array]:
        """A request in a task of its own, queued by now."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        task = asyncio.create_task(self.infer(self.tensors(rows, width), deadline_s))
        await settle()
        return task

    async def occupy(self) -> None:
        """Give every replica a batch of one row, so that none is idle."""
        for _ in range(self.limits.replicas):
            await self.send(1)

    async def release_all(self) -> None:
        """Answer everything that arrives until nothing more does."""
        released = 0
        while released < len(self.tier.calls):
            for call in self.tier.calls[released:]:
                released += 1
                if not call.answer.done():
                    call.release()
            await asyncio.sleep(2 * self.limits.max_wait_s)

    def assert_empty(self) -> None:
        """Nothing is queued, and nothing is under way."""
        assert (self.coalescer.queue_rows, self.coalescer.inflight_rows) == (0, 0)
        assert not self.coalescer._queues


async def settle() -> None:
    """Let everything happen that needs no time."""
    for _ in range(10):
        await asyncio.sleep(0)


async def error_of(work: Awaitable[Any]) -> RequestError:
    """The error that a request ends with."""
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value


# --- when a batch leaves ----------------------------------------------------------------------


def test_an_idle_tier_gets_a_row_at_once(run_virtually: Run) -> None:
    """A lone caller does not wait for company."""

    async def scenario() -> None:
        bench = Bench()
        task = await bench.send(1)
        assert bench.tier.sizes == [1]
        assert bench.recorder.waits_s == [0]
        await bench.release_all()
        assert (await task).tolist() == [[2]]
        bench.assert_empty()

    run_virtually(scenario)


def test_every_idle_replica_gets_a_row_at_once(run_virtually: Run) -> None:
    """As many batches as replicas, before any waits."""

    async def scenario() -> None:
        bench = Bench(replicas=3)
        for _ in range(4):
            await bench.send(1)
        assert bench.tier.sizes == [1, 1, 1]
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


def test_a_busy_tier_gets_a_full_batch_at_once(run_virtually: Run) -> None:
    """Filled by several requests; the one too many waits."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.occupy()
        for _ in range(3):
            await bench.send(1)
        assert bench.tier.sizes == [1]
        await bench.send(1)
        assert bench.tier.sizes == [1, 4]
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


def test_a_busy_tier_gets_a_part_batch_after_the_longest_wait(run_virtually: Run) -> None:
    """Not before, and measured from the oldest row."""

    async def scenario() -> None:
        bench = Bench()
        await bench.occupy()
        await bench.send(1)
        await asyncio.sleep(MAX_WAIT_S * 0.6)
        await bench.send(1)
        await asyncio.sleep(MAX_WAIT_S * 0.3)
        assert bench.tier.sizes == [1]
        await asyncio.sleep(MAX_WAIT_S * 0.2)
        assert bench.tier.sizes == [1, 2]
        assert bench.recorder.waits_s[1] == pytest.approx(MAX_WAIT_S, abs=2e-4)
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


def test_padding_is_counted(run_virtually: Run) -> None:
    """What a source adds to make requests equally long."""

    async def scenario() -> None:
        bench = Bench()

        def collate(parts: Any) -> Tensors:
            width = max(part["x"].shape[1] for part in parts)
            return {
                "x": np.concatenate(
                    [np.pad(part["x"], ((0, 0), (0, width - part["x"].shape[1]))) for part in parts]
                )
            }

        bench.coalescer = WatchedCoalescer(bench.tier, bench.limits, bench.recorder, collate, lambda _: None)
        tasks = [await bench.send(1)]
        tasks += [asyncio.create_task(bench.infer(bench.tensors(1, width))) for width in (1, 3)]
        await bench.release_all()
        await asyncio.gather(*tasks)
        assert bench.recorder.padding == [(1, 0), (6, 2)]

    run_virtually(scenario)


def test_a_tier_that_becomes_idle_gets_what_is_queued(run_virtually: Run) -> None:
    """Without waiting any longer."""

    async def scenario() -> None:
        bench = Bench()
        await bench.occupy()
        await bench.send(2)
        bench.tier.calls[0].release()
        await settle()
        assert bench.tier.sizes == [1, 2]
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_queue_stays_here_where_it_is_bounded(replicas: int, run_virtually: Run) -> None:
    """A tier that does not answer has a few batches, never all of them."""

    async def scenario() -> None:
        bench = Bench(replicas=replicas)
        for _ in range(10):
            await bench.send(4)
        await asyncio.sleep(1)
        assert bench.tier.sizes == [4] * BATCHES_PER_REPLICA * replicas
        assert bench.coalescer.queue_rows == 40 - 4 * BATCHES_PER_REPLICA * replicas
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


# --- which rows go where ----------------------------------------------------------------------


def test_each_request_gets_its_own_rows_in_order(run_virtually: Run) -> None:
    """Also when batches come back in another order."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.occupy()
        requests = [bench.tensors(rows) for rows in (2, 1, 5)]
        tasks = [asyncio.create_task(bench.infer(tensors)) for tensors in requests]
        await settle()
        bench.tier.calls[1].release()
        await settle()
        await bench.release_all()
        for tensors, task in zip(requests, tasks, strict=True):
            np.testing.assert_array_equal(await task, tensors["x"] * 2)
        bench.assert_empty()

    run_virtually(scenario)


def test_a_large_request_is_split_and_joined(run_virtually: Run) -> None:
    """No batch is larger than the limit; the caller sees one answer."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        tensors = bench.tensors(11)
        task = asyncio.create_task(bench.infer(tensors))
        await settle()
        assert bench.tier.sizes == [4, 4]
        bench.tier.calls[1].release()
        await settle()
        await bench.release_all()
        np.testing.assert_array_equal(await task, tensors["x"] * 2)
        assert sorted(bench.tier.sizes) == [3, 4, 4]
        bench.assert_empty()

    run_virtually(scenario)


def test_requests_of_different_keys_share_no_batch(run_virtually: Run) -> None:
    """They could not be concatenated."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.occupy()
        for width in (1, 2, 1, 2):
            await bench.send(1, width)
        await asyncio.sleep(2 * MAX_WAIT_S)
        await bench.release_all()
        assert [call.batch["x"].shape for call in bench.tier.calls] == [(1, 1), (2, 1), (2, 2)]
        bench.assert_empty()

    run_virtually(scenario)


def test_a_full_batch_overtakes_an_older_key_that_waits_to_fill(run_virtually: Run) -> None:
    """The slot that the older one cannot use yet is used."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.occupy()
        await bench.send(1, width=2)
        await bench.send(4, width=3)
        assert [call.batch["x"].shape for call in bench.tier.calls] == [(1, 1), (4, 3)]
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


@pytest.mark.parametrize("width", [1, 2], ids=["same-key", "other-key"])
def test_a_large_request_does_not_starve_small_ones(width: int, run_virtually: Run) -> None:
    """It takes turns: a small one that came later leaves once it has waited for its batch to fill."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.send(100)
        small = await bench.send(1, width)
        for index in range(10):
            await asyncio.sleep(MAX_WAIT_S / 4)
            bench.tier.calls[index].release()
            await settle()
        assert small.done()
        assert bench.coalescer.queue_rows > 50
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


def test_two_large_requests_take_turns(run_virtually: Run) -> None:
    """Neither has to wait for all of the other."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        tasks = [await bench.send(20, width) for width in (1, 2)]
        for index in range(10):
            await asyncio.sleep(0.001)
            bench.tier.calls[index].release()
            await settle()
        widths = [call.batch["x"].shape[1] for call in bench.tier.calls]
        assert sorted(widths) == [1] * 5 + [2] * 5
        # The first has two batches under way before the second arrives.
        assert widths[2:8] in ([2, 1] * 3, [1, 2] * 3)
        await asyncio.gather(*tasks)

    run_virtually(scenario)


# --- what a queue holds -----------------------------------------------------------------------


def test_a_full_queue_is_overloaded(run_virtually: Run) -> None:
    """At once, with a time to come back; what is queued stays."""

    async def scenario() -> None:
        bench = Bench(max_rows=4, max_queue_rows=8)
        for rows in (4, 4, 5, 3):
            await bench.send(rows)
        error = await error_of(bench.infer(bench.tensors(1)))
        assert isinstance(error, Overloaded)
        assert dict(error.headers)["retry-after"] == "1"
        assert bench.coalescer.queue_rows == 8
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


def test_retry_after_follows_the_drain_rate(run_virtually: Run) -> None:
    """The time that the queue needs at the rate of late, between 1 s and a minute."""

    async def scenario() -> None:
        bench = Bench(max_rows=4, max_queue_rows=40)
        for _ in range(2):
            task = await bench.send(4)
            await asyncio.sleep(2)  # 2 rows a second
            bench.tier.calls[-1].release()
            await task
        tasks = [await bench.send(4) for _ in range(12)]
        error = await error_of(bench.infer(bench.tensors(1)))
        assert 15 <= int(dict(error.headers)["retry-after"]) <= 25
        await bench.release_all()
        await asyncio.gather(*tasks)
        bench.assert_empty()

    run_virtually(scenario)


def test_more_rows_than_the_queue_holds_are_too_large(run_virtually: Run) -> None:
    """Waiting would not help; exactly as many as it holds are welcome."""

    async def scenario() -> None:
        bench = Bench(max_queue_rows=8)
        assert isinstance(await error_of(bench.infer(bench.tensors(9))), TooLarge)
        task = await bench.send(8)
        await bench.release_all()
        assert len(await task) == 8
        bench.assert_empty()

    run_virtually(scenario)


def test_admitted_rows_that_are_never_submitted_are_given_back(run_virtually: Run) -> None:
    """By `release`, when preprocessing failed."""

    async def scenario() -> None:
        bench = Bench(max_queue_rows=8)
        bench.coalescer.admit(8, 40)
        with pytest.raises(Overloaded):
            bench.coalescer.admit(1, 0)
        bench.coalescer.release(8, 40)
        bench.assert_empty()

    run_virtually(scenario)


@pytest.mark.parametrize(
    ("tensors", "key"),
    [
        ({}, None),
        ({"x": np.zeros((3, 1))}, None),
        ({"x": np.zeros((2, 1)), "mask": np.zeros((1, 1))}, None),
        ({"x": np.zeros(())}, None),
        (None, None),
        ({"x": np.zeros((2, 1))}, []),
        ({"x": np.zeros((2, 1))}, ZeroDivisionError()),
    ],
    ids=["none", "more", "ragged", "scalar", "no-dict", "unhashable-key", "key-raises"],
)
def test_preprocessed_tensors_that_cannot_be_queued_are_the_models_error(
    tensors: Any, key: Any, run_virtually: Run
) -> None:
    """And their rows are given back."""

    def batch_key(_: Tensors) -> object:
        if isinstance(key, Exception):
            raise key
        return key

    async def scenario() -> None:
        bench = Bench()
        bench.coalescer._batch_key = batch_key
        bench.coalescer.admit(2, 16)
        deadline_s = asyncio.get_running_loop().time() + 1
        error = await error_of(bench.coalescer.submit(tensors, 2, deadline_s, admitted_bytes=16))
        assert isinstance(error, ModelError)
        assert bench.tier.calls == []
        bench.assert_empty()

    run_virtually(scenario)


# --- requests that end early ------------------------------------------------------------------


def test_a_cancelled_requests_queued_rows_never_reach_the_tier(run_virtually: Run) -> None:
    """The caller is gone: its rows leave the queue at once."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.occupy()
        task = await bench.send(3)
        assert bench.coalescer.queue_rows == 3
        task.cancel()
        await settle()
        assert bench.coalescer.queue_rows == 0
        await bench.release_all()
        assert bench.tier.sizes == [1]
        bench.assert_empty()

    run_virtually(scenario)


def test_a_request_cancelled_while_a_batch_returns_is_not_sent(run_virtually: Run) -> None:
    """The slot opens in the same turn of the loop."""

    async def scenario() -> None:
        bench = Bench(max_rows=8)
        await bench.occupy()
        gone = await bench.send(3)
        kept = await bench.send(1)
        bench.tier.calls[0].release()  # Its task wakes up first, and sends what is queued.
        gone.cancel()
        await settle()
        assert bench.tier.sizes == [1, 1]
        await bench.release_all()
        await kept
        bench.assert_empty()

    run_virtually(scenario)


def test_a_cancelled_large_request_sends_no_more(run_virtually: Run) -> None:
    """What is under way comes back for nobody, the rest stays unsent."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        task = await bench.send(20)
        task.cancel()
        await settle()
        await bench.release_all()
        assert bench.tier.sizes == [4, 4]
        bench.assert_empty()

    run_virtually(scenario)


def test_a_request_that_expires_in_the_queue_costs_no_compute(run_virtually: Run) -> None:
    """504, when its time is up and not later."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        bench = Bench(max_rows=4, max_wait_s=60)
        await bench.occupy()
        started_s = loop.time()
        error = await error_of(await bench.send(3, timeout_s=0.5))
        assert isinstance(error, Deadline)
        assert "queued" in str(error)
        assert loop.time() - started_s == pytest.approx(0.5)
        assert bench.coalescer.queue_rows == 0
        await bench.release_all()
        assert bench.tier.sizes == [1]
        bench.assert_empty()

    run_virtually(scenario)


def test_a_request_that_expires_while_it_runs_is_answered_in_time(run_virtually: Run) -> None:
    """The batch goes on; its mates get their rows."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.occupy()
        hasty = await bench.send(1, timeout_s=0.5)
        mate = await bench.send(3)
        error = await error_of(hasty)
        assert isinstance(error, Deadline)
        assert "running" in str(error)
        await bench.release_all()
        assert len(await mate) == 3
        bench.assert_empty()

    run_virtually(scenario)


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_request_that_arrives_too_late_is_not_sent(late_s: float, run_virtually: Run) -> None:
    """Even to an idle tier: its preprocessing took all its time."""

    async def scenario() -> None:
        bench = Bench()
        deadline_s = asyncio.get_running_loop().time() - late_s
        assert isinstance(await error_of(bench.infer(bench.tensors(1), deadline_s)), Deadline)
        assert bench.tier.calls == []
        bench.assert_empty()

    run_virtually(scenario)


# --- tiers that fail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (TierLost("lost twice"), TierLost),
        (ZeroDivisionError(), InternalError),
        (asyncio.CancelledError(), InternalError),
    ],
    ids=["lost", "unexpected", "cancelled"],
)
def test_an_error_fails_the_requests_of_its_batch_only(
    raised: BaseException, expected: type[RequestError], run_virtually: Run
) -> None:
    """Each with an instance of its own; the next batch is served."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.occupy()
        failing = [await bench.send(2), await bench.send(2)]
        spared = await bench.send(3)
        bench.tier.calls[1].fail(raised)
        errors = [await error_of(task) for task in failing]
        assert [type(error) for error in errors] == [expected, expected]
        assert errors[0] is not errors[1]
        await bench.release_all()
        assert len(await spared) == 3
        bench.assert_empty()

    run_virtually(scenario)


@pytest.mark.parametrize("bad", [[0], [3], [1, 2], [0, 1, 2, 3], []])
def test_a_row_that_makes_the_model_raise_fails_its_own_request_only(
    bad: list[int], run_virtually: Run
) -> None:
    """The batch runs again by halves, until each request stands alone."""

    class Picky(RandomTier):
        async def run(self, batch: Tensors, **_: Any) -> BatchResult:
            if set(batch["x"][:, 0]) & poison:
                raise ModelError("the model raised")
            return doubled(batch)

    poison: set[Any] = set()

    async def scenario() -> None:
        bench = Bench(Picky([], 8, 1), max_rows=8)
        tensors = [bench.tensors(2) for _ in range(4)]
        poison.update(tensors[n]["x"][0, 0] for n in bad)
        blocker = bench.tensors(1)
        deadline_s = asyncio.get_running_loop().time() + LATER_S
        tasks = [asyncio.create_task(bench.infer(each, deadline_s)) for each in (blocker, *tensors)]
        ends = (await asyncio.gather(*tasks, return_exceptions=True))[1:]
        for n, end in enumerate(ends):
            if n in bad:
                assert isinstance(end, ModelError)
            else:
                np.testing.assert_array_equal(end, tensors[n]["x"] * 2)
        bench.assert_empty()

    run_virtually(scenario)


def test_an_unexpected_error_shows_no_internals(run_virtually: Run) -> None:
    """They are its cause, for the log."""

    async def scenario() -> None:
        bench = Bench()
        task = await bench.send(1)
        bench.tier.calls[0].fail(ZeroDivisionError("secret"))
        error = await error_of(task)
        assert "secret" not in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError)

    run_virtually(scenario)


def test_a_large_request_that_failed_in_part_sends_no_more(run_virtually: Run) -> None:
    """Nobody waits for the rest."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        task = await bench.send(40)
        bench.tier.calls[0].fail(ModelError("the model raised"))
        assert isinstance(await error_of(task), ModelError)
        await bench.release_all()
        assert bench.tier.sizes == [4, 4]
        bench.assert_empty()

    run_virtually(scenario)


@pytest.mark.parametrize(
    "outputs",
    [
        {},
        {"y": np.zeros((1, 1))},
        {"y": np.zeros((3, 1))},
        {"y": np.zeros((2, 1)), "z": np.zeros((1, 1))},
    ],
    ids=["none", "fewer", "more", "second-output-fewer"],
)
def test_another_number_of_rows_is_the_models_error(outputs: Tensors, run_virtually: Run) -> None:
    """Nobody gets somebody else's rows."""

    async def scenario() -> None:
        bench = Bench()
        task = await bench.send(2)
        bench.tier.calls[0].answer.set_result(BatchResult(outputs, 0.001))
        assert isinstance(await error_of(task), ModelError)
        bench.assert_empty()

    run_virtually(scenario)


def test_batches_of_other_shapes_fail_the_split_request_alone(run_virtually: Run) -> None:
    """Outputs that a model pads to its batch cannot be joined; a mate's rows are whole."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        large = await bench.send(6)
        mate = await bench.send(2)
        for width, call in enumerate(bench.tier.calls, 1):
            call.answer.set_result(BatchResult({"y": np.zeros((len(call.rows), width))}, 0.001))
        error = await error_of(large)
        assert isinstance(error, ModelError)
        assert "other shapes" in str(error)
        assert len(await mate) == 2
        bench.assert_empty()

    run_virtually(scenario)


# --- bytes ------------------------------------------------------------------------------------


def test_a_queue_is_bounded_in_bytes_too(run_virtually: Run) -> None:
    """A request's bytes are held until its last row has left."""

    async def scenario() -> None:
        bench = Bench(max_rows=4, max_queue_bytes=400)
        await bench.occupy()
        await bench.send(10, width=5)  # 200 bytes, of which 4 rows leave at once.
        assert bench.coalescer.queue_bytes == 200
        second = await bench.send(10, width=5)
        assert isinstance(await error_of(bench.infer(bench.tensors(1))), Overloaded)
        second.cancel()
        await settle()
        assert bench.coalescer.queue_bytes == 200
        last = await bench.send(1)
        await bench.release_all()
        assert len(await last) == 1
        bench.assert_empty()
        assert bench.coalescer.queue_bytes == 0

    run_virtually(scenario)


def test_a_request_larger_than_the_queue_is_too_large(run_virtually: Run) -> None:
    """Waiting would not help."""

    async def scenario() -> None:
        bench = Bench(max_queue_bytes=40)
        assert isinstance(await error_of(bench.infer(bench.tensors(11))), TooLarge)
        bench.assert_empty()

    run_virtually(scenario)


# --- nobody waits any more --------------------------------------------------------------------


def test_a_batch_carries_the_latest_deadline_of_its_rows(run_virtually: Run) -> None:
    """A replica may drop it then, and no sooner."""

    async def scenario() -> None:
        bench = Bench(max_rows=4)
        await bench.occupy()
        now_s = asyncio.get_running_loop().time()
        for timeout_s in (5, 50, 20, 10):
            await bench.send(1, timeout_s=timeout_s)
        assert bench.tier.calls[-1].deadline_s == pytest.approx(now_s + 50, abs=0.01)
        await bench.release_all()

    run_virtually(scenario)


@pytest.mark.parametrize("leaves", ["cancelled", "expired"])
def test_a_batch_that_nobody_waits_for_is_called_off(leaves: str, run_virtually: Run) -> None:
    """Once the last of its requests has gone, and its room is free."""

    async def scenario() -> None:
        bench = Bench(max_rows=2)
        await bench.occupy()
        tasks = [await bench.send(1, timeout_s=3 + 2 * number) for number in range(2)]
        (call,) = bench.tier.calls[1:]
        for number, task in enumerate(tasks):
            assert not call.answer.cancelled()
            if leaves == "cancelled":
                task.cancel()
            else:
                await asyncio.sleep(2 * number + 3.5 - 3 * number)
            await settle()
        assert call.answer.cancelled()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert bench.coalescer.inflight_rows == 1
        await bench.release_all()
        bench.assert_empty()

    run_virtually(scenario)


# --- rows that end replicas -------------------------------------------------------------------


class DeadlyTier:
    """Ends a replica for each attempt at a batch with a deadly row; healed after a while."""

    def __init__(self, deadly: set[int], heals_s: float = 0.0, *, is_direct: bool = True) -> None:
        self.deadly, self.heals_s = deadly, heals_s
        #: Whether a lost call shows that its replica ended with the batch.
        self.is_direct = is_direct
        self.ended = 0
        self.healed_s = 0.0
        self.alone: list[int] = []

    async def run(
        self, batch: Tensors, *, deadline_s: float = math.inf, is_suspect: bool = False
    ) -> BatchResult:
        """Compute, or not."""
        attempts = 1 if is_suspect else ATTEMPTS
        await asyncio.sleep(0.001)
        now_s = asyncio.get_running_loop().time()
        rows = batch["x"][:, 0].astype(int).tolist()
        if is_suspect:
            self.alone += rows
        if now_s < self.healed_s:
            raise TierLost("nobody is there")
        if self.deadly & set(rows):
            self.ended += attempts
            self.healed_s = now_s + self.heals_s
            error = TierLost("gone")
            error.calls_lost = attempts
            error.replicas_lost = attempts if is_suspect or self.is_direct else 0
            raise error
        return doubled(batch)

    async def report(self, *, with_example: bool) -> TierReport:
        """Nobody asks."""
        raise NotImplementedError


@pytest.mark.parametrize("heals_s", [0.0, 3.0])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_deadly_row_is_found_and_its_batch_mates_are_answered(
    heals_s: float, rows: int, run_virtually: Run
) -> None:
    """Three replicas end: two with its batch, one with the row alone. From then on it is refused."""

    async def scenario() -> None:
        bench = Bench(DeadlyTier(set(), heals_s), max_rows=8)
        tensors = [bench.tensors(rows) for _ in range(4)]
        bench.tier.deadly = {int(tensors[2]["x"][-1, 0])}
        deadline_s = asyncio.get_running_loop().time() + 30
        ends = await asyncio.gather(
            *(bench.infer(each, deadline_s) for each in tensors), return_exceptions=True
        )
        assert isinstance(ends.pop(2), Quarantined)
        innocent = [*tensors[:2], tensors[3]]
        for each, end in zip(innocent, ends, strict=True):
            np.testing.assert_array_equal(end, each["x"] * 2)
        assert bench.tier.ended == 3
        again = await error_of(bench.infer(tensors[2]))
        assert isinstance(again, Quarantined)
        assert f"row {rows - 1} " in str(again)
        assert bench.tier.ended == 3
        for each in innocent:
            np.testing.assert_array_equal(await bench.infer(each), each["x"] * 2)
        bench.assert_empty()

    run_virtually(scenario)


def test_a_row_alone_in_its_batch_ends_no_third_replica(run_virtually: Run) -> None:
    """It is known already."""

    async def scenario() -> None:
        bench = Bench(DeadlyTier({1}))
        assert isinstance(await error_of(bench.infer(bench.tensors(1))), Quarantined)
        assert bench.tier.ended == 2
        assert bench.tier.alone == []

    run_virtually(scenario)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_deadly_row_is_found_where_only_calls_were_lost(rows: int, run_virtually: Run) -> None:
    """As over a Serve handle, which does not tell whether a replica ended with the batch, or before."""

    async def scenario() -> None:
        bench = Bench(DeadlyTier(set(), heals_s=0.5, is_direct=False), max_rows=8)
        tensors = [bench.tensors(rows) for _ in range(3)]
        bench.tier.deadly = {int(tensors[1]["x"][0, 0])}
        deadline_s = asyncio.get_running_loop().time() + 30
        ends = await asyncio.gather(
            *(bench.infer(each, deadline_s) for each in tensors), return_exceptions=True
        )
        assert isinstance(ends.pop(1), Quarantined)
        for each, end in zip((tensors[0], tensors[2]), ends, strict=True):
            np.testing.assert_array_equal(end, each["x"] * 2)
        bench.assert_empty()

    run_virtually(scenario)


def test_a_tier_without_replicas_proves_nothing_against_a_row(run_virtually: Run) -> None:
    """The batch never reached one."""

    async def scenario() -> None:
        tier = DeadlyTier(set())
        bench = Bench(tier)
        tier.healed_s = asyncio.get_running_loop().time() + 10
        assert isinstance(await error_of(bench.infer(bench.tensors(1))), TierLost)
        tier.healed_s = 0
        again = bench.tensors(1)
        np.testing.assert_array_equal(await bench.infer(again), again["x"] * 2)

    run_virtually(scenario)


def test_rows_are_tried_alone_no_longer_than_somebody_waits(run_virtually: Run) -> None:
    """A tier that does not heal in time: 504, and no task is left."""

    async def scenario() -> None:
        bench = Bench(DeadlyTier({1}, heals_s=1000))
        tensors = bench.tensors(2)
        deadline_s = asyncio.get_running_loop().time() + 5
        assert isinstance(await error_of(bench.infer(tensors, deadline_s)), Deadline)
        await settle()
        bench.assert_empty()

    run_virtually(scenario)


# --- fairness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("large_rows", [64, 1024])
def test_small_requests_hardly_notice_large_ones(large_rows: int, run_virtually: Run) -> None:
    """Beside large requests a lone row waits for a batch of each at most, however large they are."""
    batch_s = 0.010

    class Steady(HeldTier):
        async def run(self, batch: Tensors, **_: Any) -> BatchResult:
            async with self.device:
                await asyncio.sleep(batch_s)
            return doubled(batch)

    async def scenario() -> None:
        tier = Steady()
        tier.device = asyncio.Lock()  # type: ignore[attr-defined]
        bench = Bench(tier, max_rows=8, max_queue_rows=8192)
        loop = asyncio.get_running_loop()
        large = [asyncio.create_task(bench.infer(bench.tensors(large_rows))) for _ in range(4)]
        waits_s = []
        for _ in range(20):
            await asyncio.sleep(0.007)
            began_s = loop.time()
            await bench.infer(bench.tensors(1))
            waits_s.append(loop.time() - began_s)
        # Two batches may be under way when it comes; each large request is due once, then it is.
        assert max(waits_s) <= (BATCHES_PER_REPLICA + len(large) + 1) * batch_s + 1e-6
        assert not all(task.done() for task in large) or large_rows == 64
        for task in large:
            task.cancel()
        await asyncio.gather(*large, return_exceptions=True)

    run_virtually(scenario)


# --- whatever happens -------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """One request of a random run."""

    after_s: float
    rows: int
    width: int
    timeout_s: float
    cancel_after_s: float | None


@dataclass(frozen=True)
class Outcome:
    """What the tier does with a batch of a random run."""

    delay_s: float
    kind: str


MOMENTS = st.sampled_from([0.0, 0.001, 0.004, 0.02])
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        after_s=MOMENTS,
        rows=st.integers(1, 14),
        width=st.integers(1, 2),
        timeout_s=st.sampled_from([0.003, 0.05, LATER_S, LATER_S, LATER_S]),
        cancel_after_s=st.one_of(st.none(), st.none(), MOMENTS),
    ),
    min_size=1,
    max_size=12,
)
OUTCOMES = st.lists(
    st.builds(
        Outcome,
        delay_s=MOMENTS,
        kind=st.sampled_from(["good", "good", "good", "raises", "lost", "short", "breaks"]),
    ),
    min_size=1,
    max_size=8,
)


class RandomTier:
    """Answers as its list of outcomes says, over and over; checks every batch that arrives."""

    def __init__(self, outcomes: list[Outcome], max_rows: int, replicas: int) -> None:
        self._outcomes = itertools.cycle(outcomes)
        self._max_rows = max_rows
        self._max_calls = BATCHES_PER_REPLICA * replicas
        self._under_way = 0
        self.sent_s: dict[int, float] = {}
        self.failed: set[int] = set()
        #: Rows of batches whose model raised. They may come again, in smaller batches.
        self.raised: set[int] = set()
        #: Broken promises. Raised in here they would become the tier's errors.
        self.faults: list[str] = []

    async def run(self, batch: Tensors, **_: Any) -> BatchResult:
        """Compute, or not."""
        numbers = batch["x"]
        rows = numbers[:, 0].astype(int).tolist()
        self._under_way += 1
        self._check(1 <= len(rows) <= self._max_rows, f"a batch of {len(rows)} rows")
        again = self.sent_s.keys() & set(rows)
        self._check(again <= self.raised, f"a row of {rows} is sent twice")
        self._check(self._under_way <= self._max_calls, f"{self._under_way} batches at once")
        self.sent_s |= dict.fromkeys(rows, asyncio.get_running_loop().time())
        outcome = next(self._outcomes)
        if outcome.kind in {"raises", "short"}:
            self.raised |= set(rows)
        elif outcome.kind != "good":
            self.failed |= set(rows)
        try:
            await asyncio.sleep(outcome.delay_s)
        finally:
            self._under_way -= 1
        if outcome.kind == "short":
            return BatchResult({"y": numbers[1:] * 2}, 0.001)
        errors = {"raises": ModelError("raised"), "lost": TierLost("lost"), "breaks": KeyError("x")}
        if error := errors.get(outcome.kind):
            raise error
        return doubled(batch)

    def _check(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)

    async def report(self, *, with_example: bool) -> TierReport:
        """Nobody asks."""
        raise NotImplementedError


async def one_request(bench: Bench, arrival: Arrival, start_s: float) -> None:
    """Send a request at its time, and hold its end against everything that was promised."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(start_s)
    tensors = bench.tensors(arrival.rows, arrival.width)
    numbers = set(tensors["x"][:, 0].astype(int).tolist())
    deadline_s = loop.time() + arrival.timeout_s
    task = asyncio.create_task(bench.infer(tensors, deadline_s))
    if arrival.cancel_after_s is not None:
        loop.call_later(arrival.cancel_after_s, task.cancel)
    try:
        outputs = await task
    except asyncio.CancelledError:
        assert arrival.cancel_after_s is not None
    except TooLarge:
        assert arrival.rows > bench.limits.max_queue_rows
    except Overloaded:
        assert arrival.rows <= bench.limits.max_queue_rows
    except Deadline:
        assert loop.time() == pytest.approx(deadline_s, abs=1e-6)
    except (ModelError, TierLost, InternalError):
        assert numbers & (bench.tier.failed | bench.tier.raised)
    else:
        np.testing.assert_array_equal(outputs, tensors["x"] * 2)
        assert not numbers & bench.tier.failed
        assert loop.time() <= deadline_s + 1e-6
    ended_s = loop.time()
    assert all(bench.tier.sent_s.get(number, 0) <= ended_s for number in numbers)
    sent = len(numbers & set(bench.tier.sent_s))
    await asyncio.sleep(LATER_S)
    assert len(numbers & set(bench.tier.sent_s)) == sent, "rows of a request that is over were sent"


@settings(max_examples=200, report_multiple_bugs=False)
@given(
    arrivals=ARRIVALS,
    outcomes=OUTCOMES,
    max_rows=st.integers(1, 6),
    replicas=st.integers(1, 3),
    max_queue_rows=st.integers(1, 20),
    max_wait_s=st.sampled_from([0.0, 0.002, 0.05]),
)
def test_whatever_happens_every_promise_is_kept(
    run_virtually: Run,
    *,
    arrivals: list[Arrival],
    outcomes: list[Outcome],
    max_rows: int,
    replicas: int,
    max_queue_rows: int,
    max_wait_s: float,
) -> None:
    """Random sizes, delays, failures, deadlines and cancellations."""

    async def scenario() -> None:
        tier = RandomTier(outcomes, max_rows, replicas)
        bench = Bench(
            tier,
            max_rows=max_rows,
            max_queue_rows=max_queue_rows,
            replicas=replicas,
            max_wait_s=max_wait_s,
        )
        starts_s = itertools.accumulate(arrival.after_s for arrival in arrivals)
        ends = await asyncio.gather(
            *(one_request(bench, *pair) for pair in zip(arrivals, starts_s, strict=True)),
            return_exceptions=True,
        )
        assert tier.faults == []
        for error in filter(None, ends):
            raise error
        assert all(
            0 <= queued <= max_queue_rows and 0 <= under_way <= 2 * replicas * max_rows
            for queued, under_way in bench.coalescer.lengths
        )
        assert all(waited_s >= 0 for waited_s in bench.recorder.waits_s)
        assert sum(bench.recorder.batches) <= len(tier.sent_s)
        bench.assert_empty()

    run_virtually(scenario)
