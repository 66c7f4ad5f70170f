"""Shadow comparison: a sampled share of answered rows goes to the reference after the reply.

Rows that a tier answered are computed by the reference too; rows for which a cheaper tier was passed
over are computed by that tier, so that it can recover, or become known. All are background batches:
small, sent only to a replica that has nothing else to do, and dropped when none is idle for too long.
Each tier has its own queue: one whose replicas are busy or gone keeps no other waiting. Now and then
the reference computes the rows of a background batch once more, in another order and company: what
FP32 itself wobbles by, the floor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from serving.config import Divergence as DivergenceConfig
from serving.gateway.background import (
    Answered,
    BackgroundBatches,
    ShadowRecorder,
    without_flags,
)
from serving.gateway.sampling import sampled_rows
from serving.tensors import Tensors, row_count

logger = logging.getLogger("halftone.shadow")


@dataclass(frozen=True, slots=True)
class _Item:
    """Sampled rows of one request, of which one tier is compared."""

    part: Answered
    #: Items of one key may share a batch.
    key: object
    rows: int
    size_bytes: int
    offered_s: float


class _Queue:
    """One tier's rows."""

    def __init__(self) -> None:
        self.items: deque[_Item] = deque()
        self.offered = asyncio.Event()
        #: Whether its last comparison failed: said once, not for every batch.
        self.is_failing = False


class Shadow:
    """One model's sampled rows. All methods run on one event loop."""

    def __init__(
        self,
        config: DivergenceConfig,
        batches: BackgroundBatches,
        tiers: Iterable[str],
        recorder: ShadowRecorder,
    ) -> None:
        """`tiers`: those that are compared with the reference."""
        self._limits = config.shadow
        self._sample = config.sample
        self._batches = batches
        self._recorder = recorder
        self._queues = {tier: _Queue() for tier in tiers}
        self._rows = 0
        self._bytes = 0
        # Even of rows that are huge, several batches fit.
        self._batch_bytes = config.shadow.max_bytes // 4

    @property
    def held(self) -> tuple[int, int]:
        """Rows and bytes that wait or are being compared."""
        return self._rows, self._bytes

    def offer(self, answered: Answered, passed_over: Sequence[str] = ()) -> None:
        """Sample the rows of an answered request.

        Args:
            answered: the request; its id decides which rows are in the sample.
            passed_over: cheaper tiers that would have answered if they were known to be good enough.
        """
        tiers = [tier for tier in (answered.tier, *passed_over) if tier in self._queues]
        if not tiers:
            return
        if chosen := sampled_rows(answered.request_id, row_count(answered.tensors), self._sample):
            # The reply is written before these rows cost anything.
            asyncio.get_running_loop().call_soon(self._take, answered, tiers, chosen)

    def _take(self, answered: Answered, tiers: Sequence[str], chosen: Sequence[int]) -> None:
        answered = replace(answered, outputs=without_flags(answered.outputs))
        held_bytes = _held_bytes(answered.tensors, answered.outputs)
        row_bytes = 1 + held_bytes // row_count(answered.tensors)
        step = max(1, min(self._batches.rows, self._batch_bytes // row_bytes))
        for tier, start in itertools.product(tiers, range(0, len(chosen), step)):
            rows = chosen[start : start + step]
            try:
                self._append(tier, answered.part(rows))
            except Exception:  # The model's own code; the caller has the answer.
                logger.exception("rows of request %s cannot be sampled", answered.request_id)
                self._recorder.outcome(tier, len(rows), "failed")

    def _append(self, tier: str, part: Answered) -> None:
        rows, size_bytes = part.rows, _held_bytes(part.tensors, part.outputs)
        key = self._batches.key(part)
        limits = self._limits
        has_room = self._rows + rows <= limits.max_rows and self._bytes + size_bytes <= limits.max_bytes
        if not (has_room and self._batches.can_compare(tier)):
            self._recorder.outcome(tier, rows, "dropped")
            return
        self._rows += rows
        self._bytes += size_bytes
        queue, now_s = self._queues[tier], asyncio.get_running_loop().time()
        queue.items.append(_Item(part, key, rows, size_bytes, now_s))
        queue.offered.set()

    async def run(self) -> None:
        """Compare what was offered, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for tier, queue in self._queues.items():
                tasks.create_task(self._run_queue(tier, queue))

    async def _run_queue(self, tier: str, queue: _Queue) -> None:
        while True:
            await queue.offered.wait()
            while items := self._next_items(tier, queue.items):
                deadline_s = items[0].offered_s + self._limits.max_age_s
                try:
                    outcome = await self._batches.compare(tier, [item.part for item in items], deadline_s)
                    queue.is_failing = False
                except Exception as error:  # Models' code, and disks: the next rows may fare better.
                    outcome = "failed"
                    if not queue.is_failing:
                        logger.warning("rows of tier %s cannot be compared: %r", tier, error)
                    queue.is_failing = True
                finally:
                    self._release(items)
                self._recorder.outcome(tier, sum(item.rows for item in items), outcome)
            queue.offered.clear()

    def _next_items(self, tier: str, queue: deque[_Item]) -> list[_Item]:
        """The oldest rows that are not too old yet, and others that may share a batch with them."""
        oldest_s = asyncio.get_running_loop().time() - self._limits.max_age_s
        while queue and queue[0].offered_s < oldest_s:
            item = queue.popleft()
            self._release([item])
            self._recorder.outcome(tier, item.rows, "dropped")
        if not queue:
            return []
        items = [queue.popleft()]
        rows, size_bytes = items[0].rows, items[0].size_bytes
        while queue and queue[0].key == items[0].key:
            rows, size_bytes = rows + queue[0].rows, size_bytes + queue[0].size_bytes
            if rows > self._batches.rows or size_bytes > self._batch_bytes:
                break
            items.append(queue.popleft())
        return items

    def _release(self, items: Iterable[_Item]) -> None:
        self._rows -= sum(item.rows for item in items)
        self._bytes -= sum(item.size_bytes for item in items)


def _held_bytes(*tensors: Tensors) -> int:
    """What tensors hold in memory, the text in them included."""
    arrays = [array for some in tensors for array in some.values()]
    text = sum(len(value) for array in arrays if array.dtype.kind == "O" for value in array.flat)
    return text + sum(array.nbytes for array in arrays)
