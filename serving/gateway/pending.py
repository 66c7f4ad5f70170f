"""Requests in a tier's queue, the slices of them that travel in batches, and how the rows come back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from serving.errors import ModelError, RequestError
from serving.gateway.tier_client import BatchResult
from serving.tensors import Tensors, slice_rows


@dataclass(slots=True, eq=False)
class Pending:
    """One request in the queue. `next_row` is the first row that has not left."""

    tensors: Tensors
    rows: int
    size_bytes: int
    key: object
    arrived_s: float
    #: When nobody waits for it any more, on the loop's clock.
    deadline_s: float
    #: Since when its next row waits: its arrival, or when its last rows left.
    turn_s: float
    done: asyncio.Future[Tensors]
    next_row: int = 0
    #: Outputs by first row, until all are back.
    parts: dict[int, Tensors] = field(default_factory=dict)
    rows_back: int = 0
    #: Those that carry rows of it now.
    batches: list[Batch] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Answered, failed, expired or abandoned: nothing waits for its rows any more."""
        return self.done.done()


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows `start:stop` of one request, as part of a batch."""

    request: Pending
    start: int
    stop: int

    @property
    def tensors(self) -> Tensors:
        """Its rows, as views."""
        if self.stop - self.start == self.request.rows:
            return dict(self.request.tensors)  # The model's own code gets it.
        return slice_rows(self.request.tensors, self.start, self.stop)


@dataclass(slots=True, eq=False)
class Batch:
    """Slices that travel together."""

    slices: list[Slice]
    call: asyncio.Task[None] | None = None

    def cancel_if_forsaken(self) -> None:
        """Stop the call when nobody waits for any of its rows."""
        if self.call is not None and all(piece.request.is_over for piece in self.slices):
            self.call.cancel()

    def end(self) -> None:
        """The call is over."""
        for piece in self.slices:
            piece.request.batches.remove(self)


def scatter(slices: list[Slice], rows: int, result: BatchResult) -> None:
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
            part = slice_rows(result.outputs, offset, offset + size)
            if size == request.rows:
                request.done.set_result(part)
            else:
                _join(request, piece.start, size, part)
        offset += size


def _join(request: Pending, start: int, rows: int, part: Tensors) -> None:
    """Keep some rows of a request that was split; complete it if those are the last ones to come back."""
    request.parts[start] = part
    request.rows_back += rows
    if request.rows_back < request.rows:
        return
    parts = [request.parts[start] for start in sorted(request.parts)]
    try:
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except (KeyError, ValueError) as error:
        # Only this request is at fault: it was split, and its batches came back unlike.
        refused = ModelError("the model's outputs have other shapes in each batch; send fewer rows at once")
        refused.__cause__ = error
        request.done.set_exception(refused)
    else:
        request.done.set_result(joined)


def fail(slices: list[Slice], error: RequestError, cause: BaseException | None = None) -> None:
    """Give every request of a batch the error. Each gets its own instance: tracebacks grow."""
    for piece in slices:
        if not piece.request.is_over:
            own = error.copy()
            own.__cause__ = cause
            piece.request.done.set_exception(own)
