"""Background batches: rows that are computed for comparison only, on replicas that are idle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from serving.divergence.comparison import Comparison, OutputComparator
from serving.errors import NotReady
from serving.gateway.captures import CaptureFolder, ComparedRows
from serving.gateway.tier_client import OVERFLOW_FLAGS
from serving.models.source import ModelSource
from serving.tensors import Array, Tensors, row_count, slice_rows

logger = logging.getLogger("halftone.shadow")

#: Rows of a background batch: what a caller's row may have to wait for is small.
BATCH_ROWS = 8
#: Between two looks for an idle replica: doubled from one to the other.
FIRST_RETRY_S, LAST_RETRY_S = 0.01, 0.16
#: Every so many background batches the floor is measured.
FLOOR_EVERY = 4


class BackgroundTier(Protocol):
    """A tier as the shadow sees it."""

    @property
    def is_ready(self) -> bool:
        """Whether the tier answers."""

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


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that a caller has the answer to."""

    request_id: str
    #: Who answered.
    tier: str
    #: Model tensors, and what the caller got: [rows, ...].
    tensors: Tensors
    outputs: Tensors

    @property
    def rows(self) -> int:
        """How many."""
        return row_count(self.tensors)

    def part(self, rows: Sequence[int]) -> Answered:
        """Some of its rows. Copies: views would keep whole requests and whole batches alive."""
        chosen = list(rows)
        tensors, outputs = (
            {name: array[chosen] for name, array in some.items()} for some in (self.tensors, self.outputs)
        )
        return Answered(self.request_id, self.tier, tensors, outputs)


class BackgroundBatches:
    """Computes what is not known of some rows, and compares. All methods run on one event loop."""

    def __init__(
        self,
        tiers: Mapping[str, BackgroundTier],
        reference: str,
        *,
        source: ModelSource,
        compare: OutputComparator,
        recorder: ShadowRecorder,
        max_rows: int = BATCH_ROWS,
        captures: CaptureFolder | None = None,
    ) -> None:
        """`tiers`: every tier of the model; `max_rows`: the most that all of them take at once."""
        #: Of one batch.
        self.rows = min(BATCH_ROWS, max_rows)
        self._tiers = tiers
        self._reference = reference
        self._source = source
        self._compare = compare
        self._recorder = recorder
        self._captures = captures
        self._batches = 0

    def can_compare(self, tier: str) -> bool:
        """Whether a tier and the reference serve."""
        return self._tiers[tier].is_ready and self._tiers[self._reference].is_ready

    def key(self, part: Answered) -> object:
        """Parts with equal keys may share a batch."""
        return part.tier, self._source.batch_key(part.tensors)

    async def compare(self, tier: str, parts: Sequence[Answered], deadline_s: float) -> str:
        """Compare a tier with the reference over rows that one of the model's tiers answered.

        Args:
            tier: any but the reference.
            parts: of one key, no more than `rows` together.
            deadline_s: on the loop's clock; rows for which no replica is idle by then are dropped.

        Returns:
            The outcome: `compared` or `dropped`.

        Raises:
            Exception: what the model's code, its replicas or the comparison raised.
        """
        batch = self._source.collate([part.tensors for part in parts])
        outputs = {name: np.concatenate([part.outputs[name] for part in parts]) for name in parts[0].outputs}
        sides = {parts[0].tier: outputs}
        for side in (tier, self._reference):
            if side not in sides:
                computed = await self._when_idle(side, batch, deadline_s)
                if computed is None:
                    return "dropped"
                sides[side] = computed
        found, wanted = sides[tier], sides[self._reference]
        comparison = await asyncio.to_thread(self._compare, tier, found, wanted)
        self._recorder.compared(tier, comparison)
        if self._captures is not None:
            ids = [part.request_id for part in parts for _ in range(part.rows)]
            rows = ComparedRows(ids, batch, found, wanted)
            await asyncio.to_thread(self._captures.consider, tier, rows, comparison)
        self._batches += 1
        if self._batches % FLOOR_EVERY == 0:
            await self._measure_floor(parts, wanted, deadline_s)
        return "compared"

    async def _when_idle(self, tier: str, batch: Tensors, deadline_s: float) -> Tensors | None:
        """Compute a batch as soon as a replica is idle; None when none was in time."""
        retry_s = FIRST_RETRY_S
        while asyncio.get_running_loop().time() < deadline_s:
            try:
                return without_flags(await self._tiers[tier].run_background(batch))
            except NotReady:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        return None

    async def _measure_floor(self, parts: Sequence[Answered], wanted: Tensors, deadline_s: float) -> None:
        """Compute the last rows again, in reverse, and the very last one twice if a batch has room.

        That is without effect on the rows, which have been compared: a failure is only said.
        """
        rows = row_count(wanted)
        twins = self.rows > 1
        # again: [again_rows], and the twin behind them
        again_rows = min(rows, self.rows - twins)
        order = [*range(rows - 1, rows - 1 - again_rows, -1), *([rows - 1] if twins else [])]
        single = [slice_rows(part.tensors, row, row + 1) for part in parts for row in range(part.rows)]
        try:
            batch = self._source.collate([single[row] for row in order])
            again = await self._when_idle(self._reference, batch, deadline_s)
            if again is None:
                return
            back = {name: array[again_rows - 1 :: -1] for name, array in again.items()}
            same_rows = slice_rows(wanted, rows - again_rows, rows)
            comparison = await asyncio.to_thread(self._compare, self._reference, back, same_rows)
        except Exception as error:
            logger.warning("the floor of the reference cannot be measured: %r", error)
            return
        self._recorder.floor(comparison)
        if twins:
            self._recorder.twins(all(_are_twins(array[0], array[-1]) for array in again.values()))


def without_flags(outputs: Tensors) -> Tensors:
    """Outputs, without what a tier's guard says about them."""
    return {name: array for name, array in outputs.items() if name != OVERFLOW_FLAGS}


def _are_twins(one: Array, other: Array) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
