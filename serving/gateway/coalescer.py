"""The coalescer: rows of many requests become batches of one tier.

An idle replica gets whatever is queued, once the event loop has read what came in together.
While every replica computes, the next batch is prepared: it leaves when it is full, or when its
oldest row has waited as long as the `Pacer` says, and at most `BATCHES_PER_REPLICA` batches per
replica are under way, so that the device never waits for a call and the queue stays here, where
it is bounded.

A request of many rows is split over batches and joined again. It takes turns with the
requests behind it, one batch at a time, so that it cannot starve them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from serving.errors import Deadline, InternalError, ModelError, NotReady, Overloaded, RequestError, TooLarge
from serving.gateway.pacing import Pacer
from serving.gateway.tier_client import BatchResult, TierClient
from serving.tensors import Tensors, slice_rows

#: One batch computes while the next one is on its way.
BATCHES_PER_REPLICA = 2
#: Weight of the newest batch in the estimate of the drain rate.
_DRAIN_SMOOTHING = 0.2

Collate = Callable[[Sequence[Tensors]], Tensors]


class TierRecorder(Protocol):
    """Where a coalescer reports what happens, one tier's metrics."""

    def queued(self, rows: int) -> None:
        """Rows in the queue now."""

    def inflight(self, rows: int) -> None:
        """Rows sent and not yet back, now."""

    def started(self, waited_s: float) -> None:
        """A request's first row left the queue."""

    def batch(self, rows: int, compute_s: float) -> None:
        """A batch came back."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one tier's queue and batches."""

    max_rows: int
    max_wait_s: float
    max_queue_rows: int
    replicas: int
    #: For a row from arrival to answer; batches are kept small enough for it.
    target_s: float | None = None


@dataclass(slots=True, eq=False)
class _Pending:
    """One request in the queue. `next_row` is the first row that has not left."""

    tensors: Tensors
    rows: int
    key: object
    arrived_s: float
    #: Since when its next row waits: its arrival, or when its last rows left.
    turn_s: float
    done: asyncio.Future[Tensors]
    next_row: int = 0
    #: Outputs by first row, until all are back.
    parts: dict[int, Tensors] = field(default_factory=dict)
    rows_back: int = 0

    @property
    def is_over(self) -> bool:
        """Answered, failed, expired or abandoned: nothing waits for its rows any more."""
        return self.done.done()


@dataclass(frozen=True, slots=True)
class _Slice:
    """Rows `start:stop` of one request, as part of a batch."""

    request: _Pending
    start: int
    stop: int


class Coalescer:
    """One tier's queue. All methods run on one event loop."""

    def __init__(
        self,
        client: TierClient,
        limits: Limits,
        recorder: TierRecorder,
        collate: Collate,
        batch_key: Callable[[Tensors], object],
    ) -> None:
        self._client = client
        self._limits = limits
        self._recorder = recorder
        self._collate = collate
        self._batch_key = batch_key
        #: Requests with rows to send, by batch key; only requests of one key share a batch.
        self._queues: dict[object, deque[_Pending]] = {}
        self._reserved_rows = 0
        self._inflight_batches = 0
        self._inflight_rows = 0
        self._pacer = Pacer(limits.max_rows, limits.max_wait_s, limits.target_s)
        #: The next look at the queues: soon, or when a batch has waited for long enough.
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._drain_rows_per_s = 0.0

    @property
    def queue_rows(self) -> int:
        """Rows admitted and not yet sent."""
        return self._reserved_rows

    @property
    def inflight_rows(self) -> int:
        """Rows sent and not yet back."""
        return self._inflight_rows

    def admit(self, rows: int) -> None:
        """Reserve room in the queue, before the request costs any work.

        Every admission is followed by `submit`, or by `release` when that never happens.

        Raises:
            TooLarge: more rows than the queue could ever hold.
            Overloaded: no room now.
        """
        if rows > self._limits.max_queue_rows:
            raise TooLarge(f"{rows} rows; this tier's queue holds {self._limits.max_queue_rows}")
        if self._reserved_rows + rows > self._limits.max_queue_rows:
            raise Overloaded("the tier's queue is full", self._retry_after_s())
        self._reserve(rows)

    async def run_background(self, batch: Tensors) -> Tensors:
        """Compute a batch that nobody waits for, past the queue, if a replica is idle.

        Raises:
            NotReady: none is.
            RequestError: what the tier answered.
        """
        if self._queues or self._inflight_batches >= self._limits.replicas:
            raise NotReady("every replica has rows to compute")
        return (await self._client.run_background(batch)).outputs

    def release(self, rows: int) -> None:
        """Give back rows that were admitted and will not be submitted."""
        self._reserve(-rows)

    async def submit(self, tensors: Tensors, rows: int, deadline_s: float) -> Tensors:
        """Queue admitted rows and wait for their outputs.

        Args:
            tensors: model tensors, each [rows, ...].
            rows: as admitted.
            deadline_s: on the loop's clock; rows still queued then are never sent.

        Raises:
            Deadline: the time ran out.
            RequestError: what the tier answered.
        """
        loop = asyncio.get_running_loop()
        arrived_s = loop.time()
        try:
            if deadline_s <= arrived_s:
                raise Deadline("the request's time ran out before it was queued")
            key = self._checked_key(tensors, rows)
        except BaseException:
            self.release(rows)
            raise
        request = _Pending(tensors, rows, key, arrived_s, arrived_s, loop.create_future())
        expiry = loop.call_at(deadline_s, self._expire, request)
        self._queues.setdefault(key, deque()).append(request)
        if self._soon is None:
            self._soon = loop.call_soon(self._pump)
        try:
            return await request.done
        finally:
            expiry.cancel()
            request.done.cancel()  # Abandoned: no effect when the outputs are there.
            self._drop_unsent(request)

    def _checked_key(self, tensors: Tensors, rows: int) -> object:
        """The batch key of preprocessed tensors. Both come from the model's own code."""
        try:
            is_whole = bool(tensors) and all(len(array) == rows for array in tensors.values())
            key = self._batch_key(tensors)
            hash(key)
        except Exception as error:
            raise ModelError("the model's preprocessed tensors cannot be queued") from error
        if not is_whole:
            raise ModelError("the model's preprocessing changed the number of rows")
        return key

    def _reserve(self, rows: int) -> None:
        self._reserved_rows += rows
        self._recorder.queued(self._reserved_rows)

    def _retry_after_s(self) -> int:
        """Seconds until the queue would be empty at the rate it drains now, at least 1."""
        if self._drain_rows_per_s <= 0:
            return 1
        return max(1, min(60, math.ceil(self._reserved_rows / self._drain_rows_per_s)))

    def _expire(self, request: _Pending) -> None:
        if not request.is_over:
            where = "queued" if request.next_row == 0 else "running"
            request.done.set_exception(Deadline(f"the request's time ran out while it was {where}"))
            self._drop_unsent(request)

    def _drop_unsent(self, request: _Pending) -> None:
        """Take a request that is over out of the queue, and its rows out of the count."""
        unsent = request.rows - request.next_row
        if unsent == 0:
            return
        request.next_row = request.rows
        self._reserve(-unsent)
        queue = self._queues.get(request.key)
        if queue is not None:
            queue.remove(request)
            if not queue:
                del self._queues[request.key]

    def _pump(self) -> None:
        """Send every batch that may leave now; set the timer for the one that may leave next."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._queues and self._inflight_batches < BATCHES_PER_REPLICA * self._limits.replicas:
            queue = min(self._queues.values(), key=lambda queue: queue[0].turn_s)
            if not self._may_leave(queue, now_s):
                full = next((q for q in self._queues.values() if self._is_full(q)), None)
                if full is None:
                    leaves_s = queue[0].turn_s + self._pacer.wait_s
                    self._timer = asyncio.get_running_loop().call_at(leaves_s, self._pump)
                    return
                queue = full
            if slices := self._take(queue, now_s):
                self._send(slices, now_s)

    def _may_leave(self, queue: deque[_Pending], now_s: float) -> bool:
        """Whether a batch of the oldest request may leave."""
        if self._inflight_batches < self._limits.replicas:
            return True
        # The timer may fire a clock tick early; without the slack it would be set again and again.
        waited_s = now_s - queue[0].turn_s + 1e-4
        return waited_s >= self._pacer.wait_s or self._is_full(queue)

    def _is_full(self, queue: deque[_Pending]) -> bool:
        rows, full_rows = 0, self._pacer.rows
        for request in queue:
            rows += request.rows - request.next_row
            if rows >= full_rows:
                return True
        return False

    def _take(self, queue: deque[_Pending], now_s: float) -> list[_Slice]:
        """A batch's rows off the queue, oldest requests first, each at most once."""
        key = queue[0].key
        slices: list[_Slice] = []
        room = self._pacer.rows
        for _ in range(len(queue)):
            if room == 0:
                break
            request = queue.popleft()
            if request.is_over:  # Cancelled or failed a moment ago.
                self._reserve(request.next_row - request.rows)
                request.next_row = request.rows
                continue
            stop = min(request.rows, request.next_row + room)
            slices.append(_Slice(request, request.next_row, stop))
            room -= stop - request.next_row
            request.next_row = stop
            if stop < request.rows:
                request.turn_s = now_s
                queue.append(request)  # Its turn comes again after those that wait already.
        if not queue:
            del self._queues[key]
        return slices

    def _send(self, slices: list[_Slice], now_s: float) -> None:
        rows = sum(piece.stop - piece.start for piece in slices)
        for piece in slices:
            if piece.start == 0:
                self._recorder.started(now_s - piece.request.arrived_s)
        self._inflight_batches += 1
        self._inflight_rows += rows
        self._reserve(-rows)
        self._recorder.inflight(self._inflight_rows)
        call = asyncio.get_running_loop().create_task(self._run(slices, rows))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _run(self, slices: list[_Slice], rows: int) -> None:
        started_s = asyncio.get_running_loop().time()
        try:
            await self._compute(slices)
        except asyncio.CancelledError:
            _fail(slices, InternalError("the batch was cancelled"))
            raise
        finally:
            self._inflight_batches -= 1
            self._inflight_rows -= rows
            self._recorder.inflight(self._inflight_rows)
            self._note_drained(rows, asyncio.get_running_loop().time() - started_s)
            self._pump()

    async def _compute(self, slices: list[_Slice]) -> None:
        """Compute a batch. Where the model raises, find out for whose rows, by halves."""
        loop = asyncio.get_running_loop()
        try:
            batch = self._collated(slices)
            sent_s = loop.time()
            result = await self._client.run(batch)
            rows = sum(piece.stop - piece.start for piece in slices)
            self._pacer.note(rows, result.compute_s, loop.time() - sent_s)
            _scatter(slices, rows, result)
            self._recorder.batch(rows, result.compute_s)
        except ModelError as error:
            waiting = [piece for piece in slices if not piece.request.is_over]
            if len(waiting) < 2:  # noqa: PLR2004  One request: it is its rows.
                _fail(waiting, error)
                return
            await self._compute(waiting[: len(waiting) // 2])
            await self._compute(waiting[len(waiting) // 2 :])
        except RequestError as error:
            _fail(slices, error)
        except Exception as error:
            _fail(slices, InternalError("the batch could not be computed"), error)

    def _collated(self, slices: list[_Slice]) -> Tensors:
        """The batch of some slices. Collating is the model's own code.

        Raises:
            ModelError: it raised.
        """
        parts = [slice_rows(piece.request.tensors, piece.start, piece.stop) for piece in slices]
        try:
            return self._collate(parts)
        except Exception as error:
            raise ModelError("the model's tensors cannot be put into one batch") from error

    def _note_drained(self, rows: int, elapsed_s: float) -> None:
        rate = rows * (self._inflight_batches + 1) / max(elapsed_s, 1e-6)
        if self._drain_rows_per_s:
            rate = _DRAIN_SMOOTHING * rate + (1 - _DRAIN_SMOOTHING) * self._drain_rows_per_s
        self._drain_rows_per_s = rate


def _scatter(slices: list[_Slice], rows: int, result: BatchResult) -> None:
    """Hand each request its rows; complete those that have all of them.

    Raises:
        ModelError: the tier returned another number of rows than it was sent.
    """
    if not result.outputs or any(len(array) != rows for array in result.outputs.values()):
        raise ModelError("the model returned another number of rows than it was given")
    offset = 0
    for piece in slices:
        request, size = piece.request, piece.stop - piece.start
        if not request.is_over:
            request.parts[piece.start] = slice_rows(result.outputs, offset, offset + size)
            request.rows_back += size
            if request.rows_back == request.rows:
                _complete(request)
        offset += size


def _complete(request: _Pending) -> None:
    """Join the parts of a request whose rows are all back."""
    parts = [request.parts[start] for start in sorted(request.parts)]
    if len(parts) == 1:
        request.done.set_result(parts[0])
        return
    try:
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except (KeyError, ValueError) as error:
        # Only this request is at fault: it was split, and its batches came back unlike.
        refused = ModelError("the model's outputs have other shapes in each batch; send fewer rows at once")
        refused.__cause__ = error
        request.done.set_exception(refused)
    else:
        request.done.set_result(joined)


def _fail(slices: list[_Slice], error: RequestError, cause: BaseException | None = None) -> None:
    """Give every request of a batch the error. Each gets its own instance: tracebacks grow."""
    for piece in slices:
        if not piece.request.is_over:
            own = error.copy()
            own.__cause__ = cause
            piece.request.done.set_exception(own)
