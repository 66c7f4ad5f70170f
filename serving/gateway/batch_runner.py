"""Computing a batch, and finding out which row is to blame when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from serving.errors import InternalError, ModelError, RequestError, TierLost
from serving.gateway.pending import Slice, fail, scatter
from serving.gateway.quarantine import Quarantine, refusal
from serving.gateway.tier_client import ATTEMPTS, TierClient
from serving.tensors import Tensors, slice_rows

#: Between two tries of a row that is computed alone, while no replica takes it.
ALONE_RETRY_S = 0.25

Collate = Callable[[Sequence[Tensors]], Tensors]


class BatchRecorder(Protocol):
    """Where it is reported what becomes of batches, one tier's metrics."""

    def batch(self, rows: int, compute_s: float) -> None:
        """A batch came back."""

    def padded(self, elements: int, padding: int) -> None:
        """A batch of that many elements was made, of which some are padding."""


class BatchRunner:
    """Computes one tier's batches. All methods run on one event loop."""

    def __init__(
        self,
        client: TierClient,
        recorder: BatchRecorder,
        collate: Collate,
        quarantine: Quarantine,
        note: Callable[[int, float, float], None],
    ) -> None:
        """Make a runner.

        Args:
            client: the tier's.
            recorder: its metrics.
            collate: makes the rows of several requests one batch.
            quarantine: where rows go that end the processes that compute them.
            note: told of every batch that came back: its rows, the seconds of its computation,
                and the seconds of its whole way.
        """
        self._client = client
        self._recorder = recorder
        self._collate = collate
        self._quarantine = quarantine
        self._note = note
        #: Rows under suspicion are computed one at a time, or one would be blamed for another.
        self._alone = asyncio.Lock()

    async def compute(self, slices: list[Slice]) -> None:
        """Compute a batch and hand each request its rows, or its error."""
        try:
            await self._compute(slices)
        except Exception as error:
            fail(slices, InternalError("the batch could not be computed"), error)

    async def _compute(self, slices: list[Slice]) -> None:
        """Where the model raises, find out for whose rows, by halves."""
        loop = asyncio.get_running_loop()
        try:
            batch = self._collated(slices)
            sent_s = loop.time()
            deadline_s = max(piece.request.deadline_s for piece in slices)
            result = await self._client.run(batch, deadline_s=deadline_s)
            rows = sum(piece.stop - piece.start for piece in slices)
            self._note(rows, result.compute_s, loop.time() - sent_s)
            scatter(slices, rows, result)
            self._recorder.batch(rows, result.compute_s)
        except ModelError as error:
            waiting = [piece for piece in slices if not piece.request.is_over]
            if len(waiting) < 2:  # noqa: PLR2004  One request: it is its rows.
                fail(waiting, error)
                return
            await self._compute(waiting[: len(waiting) // 2])
            await self._compute(waiting[len(waiting) // 2 :])
        except TierLost as error:
            if error.calls_lost == 0:
                fail(slices, error)
                return
            await self._compute_alone(slices, error.replicas_lost)
        except RequestError as error:
            fail(slices, error)

    async def _compute_alone(self, slices: list[Slice], replicas_lost: int) -> None:
        """Compute a batch that ended replicas row by row: one of its rows may be the cause.

        By halves it would end another replica each time that the batch is halved.
        """
        rows = [
            Slice(piece.request, row, row + 1) for piece in slices for row in range(piece.start, piece.stop)
        ]
        if len(rows) == 1 and replicas_lost >= ATTEMPTS:
            self._condemn(rows[0])
            return
        async with self._alone:
            for row in rows:
                await self._compute_suspect(row)

    async def _compute_suspect(self, row: Slice) -> None:
        """Compute a row alone as soon as a replica takes it. One that ends that replica too is the cause."""
        while not row.request.is_over:
            try:
                batch = self._collated([row])
                result = await self._client.run(batch, deadline_s=row.request.deadline_s, is_suspect=True)
                scatter([row], 1, result)
            except TierLost as error:
                if error.replicas_lost:
                    self._condemn(row)
                    return
            except RequestError as error:
                fail([row], error)
                return
            else:
                self._recorder.batch(1, result.compute_s)
                return
            await asyncio.sleep(ALONE_RETRY_S)

    def _condemn(self, row: Slice) -> None:
        request = row.request
        if not request.is_over:
            self._quarantine.add(slice_rows(request.tensors, row.start, row.stop))
            fail([row], refusal(row.start))

    def _collated(self, slices: list[Slice]) -> Tensors:
        """The batch of some slices. Collating is the model's own code.

        Raises:
            ModelError: it raised.
        """
        parts = [piece.tensors for piece in slices]
        try:
            batch = self._collate(parts)
            elements = sum(array.size for array in batch.values())
            own = sum(array.size for part in parts for array in part.values())
        except Exception as error:
            raise ModelError("the model's tensors cannot be put into one batch") from error
        self._recorder.padded(elements, elements - own)
        return batch
