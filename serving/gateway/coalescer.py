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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serving.errors import (
    Deadline,
    InternalError,
    ModelError,
    NotReady,
    Overloaded,
    TooLarge,
)
from serving.gateway.batch_runner import BatchRecorder, BatchRunner, Collate
from serving.gateway.drain_rate import DrainRate
from serving.gateway.expiries import Expiries
from serving.gateway.pacing import Pacer
from serving.gateway.pending import Batch, Pending, Slice, fail
from serving.gateway.quarantine import Quarantine
from serving.gateway.tier_client import TierClient
from serving.tensors import Tensors, size_bytes

#: One batch computes while the next one is on its way.
BATCHES_PER_REPLICA = 2


class TierRecorder(BatchRecorder, Protocol):
    """Where a coalescer reports what happens, one tier's metrics."""

    def started(self, waited_s: float) -> None:
        """A request's first row left the queue."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds one tier's queue and batches."""

    max_rows: int
    max_wait_s: float
    max_queue_rows: int
    #: Of the requests that have rows in the queue.
    max_queue_bytes: int
    replicas: int
    #: For a row from arrival to answer; batches are kept small enough for it.
    target_s: float | None = None


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
        self._batch_key = batch_key
        #: Requests with rows to send, by batch key; only requests of one key share a batch.
        self._queues: dict[object, deque[Pending]] = {}
        self._reserved_rows = 0
        self._reserved_bytes = 0
        self._inflight_batches = 0
        self._inflight_rows = 0
        self._pacer = Pacer(limits.max_rows, limits.max_wait_s, limits.target_s)
        #: The next look at the queues: soon, or when a batch has waited for long enough.
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expiries = Expiries(self._expire)
        self._calls: set[asyncio.Task[None]] = set()
        self._drain_rate = DrainRate()
        self._quarantine = Quarantine(lambda: asyncio.get_running_loop().time())
        self._runner = BatchRunner(client, recorder, collate, self._quarantine, self._note)

    @property
    def queue_rows(self) -> int:
        """Rows admitted and not yet sent."""
        return self._reserved_rows

    @property
    def inflight_rows(self) -> int:
        """Rows sent and not yet back."""
        return self._inflight_rows

    @property
    def queue_bytes(self) -> int:
        """What the requests take that have rows in the queue."""
        return self._reserved_bytes

    def has_room(self, rows: int, size_bytes: int) -> bool:
        """Whether `admit` would admit them now."""
        return (
            self._reserved_rows + rows <= self._limits.max_queue_rows
            and self._reserved_bytes + size_bytes <= self._limits.max_queue_bytes
        )

    def admit(self, rows: int, size_bytes: int) -> None:
        """Reserve room in the queue, before the request costs any work.

        Every admission is followed by `submit`, or by `release` when that never happens.

        Raises:
            TooLarge: more rows or bytes than the queue could ever hold.
            Overloaded: no room now.
        """
        if rows > self._limits.max_queue_rows:
            raise TooLarge(f"{rows} rows; this tier's queue holds {self._limits.max_queue_rows}")
        if size_bytes > self._limits.max_queue_bytes:
            raise TooLarge(f"{size_bytes} bytes; this tier's queue holds {self._limits.max_queue_bytes}")
        if not self.has_room(rows, size_bytes):
            raise Overloaded("the tier's queue is full", self._retry_after_s())
        self._reserve(rows, size_bytes)

    async def run_background(self, batch: Tensors) -> Tensors:
        """Compute a batch that nobody waits for, past the queue, if a replica is idle.

        Raises:
            NotReady: none is.
            RequestError: what the tier answered.
        """
        if self._queues or self._inflight_batches >= self._limits.replicas:
            raise NotReady("every replica has rows to compute")
        return (await self._client.run_background(batch)).outputs

    def release(self, rows: int, size_bytes: int) -> None:
        """Give back what was admitted and will not be submitted."""
        self._reserve(-rows, -size_bytes)

    async def submit(self, tensors: Tensors, rows: int, deadline_s: float, *, admitted_bytes: int) -> Tensors:
        """Queue admitted rows and wait for their outputs.

        Args:
            tensors: model tensors, each [rows, ...].
            rows: as admitted.
            deadline_s: on the loop's clock; rows still queued then are never sent.
            admitted_bytes: as admitted. The tensors may be larger: preprocessing made them.

        Raises:
            Overloaded: they are larger, and there is no room for them.
            Quarantined: a row is known to end the processes that compute it.
            Deadline: the time ran out.
            RequestError: what the tier answered.
        """
        loop = asyncio.get_running_loop()
        arrived_s = loop.time()
        try:
            if deadline_s <= arrived_s:
                raise Deadline("the request's time ran out before it was queued")
            key = self._checked_key(tensors, rows)
            own_bytes = size_bytes(tensors)
            if own_bytes > admitted_bytes and not self.has_room(0, own_bytes - admitted_bytes):
                raise Overloaded("the tier's queue is full", self._retry_after_s())
            if self._quarantine:
                self._quarantine.check(tensors)
        except BaseException:
            self.release(rows, admitted_bytes)
            raise
        self._reserve(0, own_bytes - admitted_bytes)
        done = loop.create_future()
        request = Pending(tensors, rows, own_bytes, key, arrived_s, deadline_s, arrived_s, done)
        expiry = self._expiries.add(request)
        self._queues.setdefault(key, deque()).append(request)
        if self._soon is None:
            self._soon = loop.call_soon(self._pump)
        try:
            return await request.done
        finally:
            self._expiries.discard(expiry)
            request.done.cancel()  # Abandoned: no effect when the outputs are there.
            self._drop_unsent(request)
            for batch in request.batches:
                batch.cancel_if_forsaken()

    def _checked_key(self, tensors: Tensors, rows: int) -> object:
        """The batch key of preprocessed tensors. Both come from the model's own code."""
        try:
            is_whole = bool(tensors) and set(map(len, tensors.values())) == {rows}
            key = self._batch_key(tensors)
            hash(key)
        except Exception as error:
            raise ModelError("the model's preprocessed tensors cannot be queued") from error
        if not is_whole:
            raise ModelError("the model's preprocessing changed the number of rows")
        return key

    def _reserve(self, rows: int, size_bytes: int = 0) -> None:
        self._reserved_rows += rows
        self._reserved_bytes += size_bytes

    def _retry_after_s(self) -> int:
        """Seconds until the queue would be empty at the rate it drains now."""
        now_s = asyncio.get_running_loop().time()
        return self._drain_rate.retry_after_s(self._reserved_rows, self._inflight_rows, now_s)

    def _expire(self, request: Pending) -> None:
        if not request.is_over:
            where = "queued" if request.next_row == 0 else "running"
            request.done.set_exception(Deadline(f"the request's time ran out while it was {where}"))
            self._drop_unsent(request)

    def _drop_unsent(self, request: Pending) -> None:
        """Take a request that is over out of the queue, and its rows out of the count."""
        unsent = request.rows - request.next_row
        if unsent == 0:
            return
        request.next_row = request.rows
        self._reserve(-unsent, -request.size_bytes)
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

    def _may_leave(self, queue: deque[Pending], now_s: float) -> bool:
        """Whether a batch of the oldest request may leave."""
        if self._inflight_batches < self._limits.replicas:
            return True
        # The timer may fire a clock tick early; without the slack it would be set again and again.
        waited_s = now_s - queue[0].turn_s + 1e-4
        return waited_s >= self._pacer.wait_s or self._is_full(queue)

    def _is_full(self, queue: deque[Pending]) -> bool:
        rows, full_rows = 0, self._pacer.rows
        for request in queue:
            rows += request.rows - request.next_row
            if rows >= full_rows:
                return True
        return False

    def _take(self, queue: deque[Pending], now_s: float) -> list[Slice]:
        """A batch's rows off the queue, oldest requests first, each at most once."""
        key = queue[0].key
        slices: list[Slice] = []
        room = self._pacer.rows
        for _ in range(len(queue)):
            if room == 0:
                break
            request = queue.popleft()
            if request.is_over:  # Cancelled or failed a moment ago.
                self._reserve(request.next_row - request.rows, -request.size_bytes)
                request.next_row = request.rows
                continue
            stop = min(request.rows, request.next_row + room)
            slices.append(Slice(request, request.next_row, stop))
            room -= stop - request.next_row
            request.next_row = stop
            if stop < request.rows:
                request.turn_s = now_s
                queue.append(request)  # Its turn comes again after those that wait already.
        if not queue:
            del self._queues[key]
        return slices

    def _send(self, slices: list[Slice], now_s: float) -> None:
        rows = sum(piece.stop - piece.start for piece in slices)
        for piece in slices:
            if piece.start == 0:
                self._recorder.started(now_s - piece.request.arrived_s)
        self._inflight_batches += 1
        self._inflight_rows += rows
        # A request's tensors are one piece: they are held until its last row has left.
        left_bytes = sum(p.request.size_bytes for p in slices if p.request.next_row == p.request.rows)
        self._reserve(-rows, -left_bytes)
        batch = Batch(slices)
        for piece in slices:
            piece.request.batches.append(batch)
        batch.call = call = asyncio.get_running_loop().create_task(self._run(batch, rows))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _run(self, batch: Batch, rows: int) -> None:
        try:
            await self._runner.compute(batch.slices)
        except asyncio.CancelledError:
            fail(batch.slices, InternalError("the batch was cancelled"))
            raise
        finally:
            batch.end()
            self._inflight_batches -= 1
            self._inflight_rows -= rows
            self._pump()

    def _note(self, rows: int, compute_s: float, round_trip_s: float) -> None:
        """A batch came back: what that says about the next ones."""
        self._pacer.note(rows, compute_s, round_trip_s)
        now_s = asyncio.get_running_loop().time()
        self._drain_rate.note(rows, round_trip_s / self._inflight_batches, now_s)
