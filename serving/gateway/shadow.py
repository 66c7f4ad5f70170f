"""Shadow comparison: a sampled share of answered rows goes to the reference after the reply.

Rows that a tier answered are computed by the reference too; rows that the reference answered in a
tripped tier's place are computed by that tier, so that it can recover. Both are background batches:
small, one at a time, sent only to a replica that has nothing else to do, and dropped when none is
idle for too long. Now and then the reference computes the rows of a background batch once more, in
another order and company: what FP32 itself wobbles by, the floor.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.config import Divergence as DivergenceConfig
from serving.divergence.comparators import ShapesDiffer
from serving.divergence.comparison import Comparison, OutputComparator
from serving.errors import NotReady, RequestError
from serving.gateway.captures import CaptureFolder, ComparedRows
from serving.gateway.sampling import sampled_rows
from serving.gateway.tier_client import OVERFLOW_FLAGS
from serving.models.source import ModelSource
from serving.tensors import Tensors, row_count, slice_rows

logger = logging.getLogger("halftone.shadow")

#: Rows of a background batch: what a caller's row may have to wait for is small.
BATCH_ROWS = 8
#: Between two looks for an idle replica.
RETRY_INTERVAL_S = 0.01
#: Every so many background batches the floor is measured.
FLOOR_EVERY = 4


class BackgroundTier(Protocol):
    """A tier as the shadow sees it."""

    async def run_background(self, batch: Tensors) -> Tensors:
        """Compute a batch at once, on a replica that is idle.

        Raises:
            NotReady: none is.
            RequestError: what the tier answered.
        """


class ShadowRecorder(Protocol):
    """Where comparisons go."""

    def compared(self, tier: str, comparison: Comparison) -> None:
        """Rows of a tier against the reference."""

    def floor(self, comparison: Comparison) -> None:
        """Rows of the reference against themselves."""

    def twins(self, agree: bool) -> None:
        """Whether one row, twice in a batch, gave one answer."""

    def outcome(self, tier: str, rows: int, outcome: str) -> None:
        """What became of sampled rows: compared, dropped or failed."""


@dataclass(slots=True)
class _Item:
    """Sampled rows of one request."""

    tensors: Tensors
    #: The outputs that the caller got.
    outputs: Tensors
    request_id: str
    #: Who answered.
    answered_by: str
    #: The tier that is compared with the reference.
    tier: str
    key: object
    rows: int
    size_bytes: int
    offered_s: float


class Shadow:
    """One model's sampled rows. All methods run on one event loop."""

    def __init__(
        self,
        config: DivergenceConfig,
        reference: str,
        *,
        tiers: Mapping[str, BackgroundTier],
        source: ModelSource,
        compare: OutputComparator,
        recorder: ShadowRecorder,
        captures: CaptureFolder | None = None,
    ) -> None:
        """`tiers`: every tier of the model, the reference among them."""
        self._config = config
        self._reference = reference
        self._tiers = tiers
        self._source = source
        self._recorder = recorder
        self._captures = captures
        self._compare = compare
        self._items: deque[_Item] = deque()
        self._rows = 0
        self._bytes = 0
        self._batches = 0
        self._offered = asyncio.Event()

    def offer(
        self, request_id: str, answered_by: str, in_place_of: str | None, tensors: Tensors, outputs: Tensors
    ) -> None:
        """Sample the rows of an answered request.

        Args:
            request_id: decides which rows are in the sample.
            answered_by: the tier that answered.
            in_place_of: the tripped tier that was declared, if one was.
            tensors: model tensors, [rows, ...].
            outputs: what the caller got, [rows, ...].
        """
        tier = in_place_of if answered_by == self._reference else answered_by
        if tier is None or tier == self._reference:
            return
        chosen = sampled_rows(request_id, row_count(tensors), self._config.sample)
        for start in range(0, len(chosen), BATCH_ROWS):
            part = chosen[start : start + BATCH_ROWS]
            own = (
                {name: array[part] for name, array in some.items() if name != OVERFLOW_FLAGS}
                for some in (tensors, outputs)
            )
            self._take(request_id, answered_by, tier, *own)

    def _take(self, request_id: str, answered_by: str, tier: str, tensors: Tensors, outputs: Tensors) -> None:
        # Copies: views would keep whole requests and whole batches alive.
        rows = row_count(tensors)
        size_bytes = sum(array.nbytes for array in (*tensors.values(), *outputs.values()))
        limits = self._config.shadow
        if self._rows + rows > limits.max_rows or self._bytes + size_bytes > limits.max_bytes:
            self._recorder.outcome(tier, rows, "dropped")
            return
        key = (tier, answered_by, self._source.batch_key(tensors))
        now_s = asyncio.get_running_loop().time()
        self._items.append(
            _Item(tensors, outputs, request_id, answered_by, tier, key, rows, size_bytes, now_s)
        )
        self._rows += rows
        self._bytes += size_bytes
        self._offered.set()

    async def run(self) -> None:
        """Compare what was offered, until cancelled."""
        while True:
            await self._offered.wait()
            while self._items:
                self._drop_old()
                if items := self._next_items():
                    await self._compare_items(items)
            self._offered.clear()

    def _drop_old(self) -> None:
        oldest_s = asyncio.get_running_loop().time() - self._config.shadow.max_age_s
        while self._items and self._items[0].offered_s < oldest_s:
            item = self._items.popleft()
            self._release(item)
            self._recorder.outcome(item.tier, item.rows, "dropped")

    def _release(self, item: _Item) -> None:
        self._rows -= item.rows
        self._bytes -= item.size_bytes

    def _next_items(self) -> list[_Item]:
        """The oldest rows, and others that may share a batch with them."""
        if not self._items:
            return []
        items = [self._items.popleft()]
        rows = items[0].rows
        while self._items and self._items[0].key == items[0].key and rows + self._items[0].rows <= BATCH_ROWS:
            items.append(self._items.popleft())
            rows += items[-1].rows
        return items

    async def _compare_items(self, items: list[_Item]) -> None:
        first, rows = items[0], sum(item.rows for item in items)
        asked = first.tier if first.answered_by == self._reference else self._reference
        try:
            batch = self._source.collate([item.tensors for item in items])
            deadline_s = first.offered_s + self._config.shadow.max_age_s
            computed = await self._when_idle(asked, batch, deadline_s)
            if computed is None:
                self._recorder.outcome(first.tier, rows, "dropped")
                return
            answered = {
                name: np.concatenate([item.outputs[name] for item in items]) for name in first.outputs
            }
            found, wanted = (computed, answered) if asked == first.tier else (answered, computed)
            comparison = await asyncio.to_thread(self._compare, first.tier, found, wanted)
            if self._captures is not None:
                ids = [item.request_id for item in items for _ in range(item.rows)]
                compared = ComparedRows(ids, batch, found, wanted)
                await asyncio.to_thread(self._captures.consider, first.tier, compared, comparison)
            self._recorder.compared(first.tier, comparison)
            self._recorder.outcome(first.tier, rows, "compared")
            self._batches += 1
            if asked == self._reference and self._batches % FLOOR_EVERY == 0:
                await self._measure_floor(items, computed, deadline_s)
        except (RequestError, ShapesDiffer, KeyError, ValueError) as error:
            logger.warning("shadow rows of tier %s cannot be compared: %s", first.tier, error)
            self._recorder.outcome(first.tier, rows, "failed")
        finally:
            for item in items:
                self._release(item)

    async def _when_idle(self, tier: str, batch: Tensors, deadline_s: float) -> Tensors | None:
        """Compute a batch as soon as a replica is idle; None when none was in time."""
        while asyncio.get_running_loop().time() < deadline_s:
            try:
                return await self._tiers[tier].run_background(batch)
            except NotReady:
                await asyncio.sleep(RETRY_INTERVAL_S)
        return None

    async def _measure_floor(self, items: list[_Item], computed: Tensors, deadline_s: float) -> None:
        """Compute the rows again, in reverse, with the last one twice."""
        rows = row_count(computed)
        order = [*range(rows - 1, -1, -1), rows - 1]
        parts = [slice_rows(item.tensors, row, row + 1) for item in items for row in range(item.rows)]
        batch = self._source.collate([parts[row] for row in order])
        again = await self._when_idle(self._reference, batch, deadline_s)
        if again is None:
            return
        back = {name: array[rows - 1 :: -1] for name, array in slice_rows(again, 0, rows).items()}
        self._recorder.floor(await asyncio.to_thread(self._compare, self._reference, back, computed))
        twins_agree = all(
            np.array_equal(array[0], array[rows], equal_nan=array.dtype.kind == "f")
            for array in again.values()
        )
        self._recorder.twins(twins_agree)
