"""Escalation: the rows that a tier's number format could not hold are computed again at the reference.

Within the same request, and only those rows. Where that cannot be done, the request is refused:
a row that overflowed is never sent to a caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelError, NonfiniteOutput
from serving.gateway.model import Lane, ServedModel
from serving.gateway.tier_client import OVERFLOW_CAUSES, OVERFLOW_FLAGS
from serving.tensors import Array, Tensors, size_bytes

#: In the effective precision of what computes products in FP16, such as `fp32-storage-fp16-cube`.
_NARROW = "fp16"


@dataclass(frozen=True, slots=True)
class Escalation:
    """What became of a request's overflowed rows."""

    rows: int
    #: `nonfinite` where a row had NaN or infinity, else `saturated`.
    cause: str


async def escalate(
    model: ServedModel,
    lane: Lane,
    tensors: Tensors,
    outputs: Tensors,
    deadline_s: float,
    *,
    verified: Tensors | None = None,
) -> tuple[Tensors, Escalation | None]:
    """Replace the rows that a tier's guard flagged.

    Args:
        model: the request's.
        lane: the tier that answered.
        tensors: model tensors, [rows, ...].
        outputs: its answer, [rows, ...], and the guard's flags unless it has no guard.
        deadline_s: the request's, on the loop's clock.
        verified: what the reference made of the same rows already, for a request that asked for it.

    Returns:
        The outputs without flags, and what was escalated, if anything was.

    Raises:
        NonfiniteOutput: there is no reference to compute the rows at.
        RequestError: what the reference answered: it is overloaded or not ready, say.
    """
    flags = outputs.get(OVERFLOW_FLAGS)
    if flags is None:
        return outputs, None
    answer = {name: array for name, array in outputs.items() if name != OVERFLOW_FLAGS}
    if not flags.any():
        return answer, None
    rows = np.flatnonzero(flags)
    for code, cause in OVERFLOW_CAUSES.items():
        if count := int((flags == code).sum()):
            model.metrics.escalated_rows.labels(model.name, lane.tier, cause).inc(count)
    reference = _reference(model, lane)
    if verified is not None:
        again = {name: array[rows] for name, array in verified.items()}
    else:
        coalescer, _ = reference.ready_coalescer()
        overflowed = {name: array[rows] for name, array in tensors.items()}
        taken_bytes = size_bytes(overflowed)
        coalescer.admit(len(rows), taken_bytes)
        again = await coalescer.submit(overflowed, len(rows), deadline_s, admitted_bytes=taken_bytes)
    replaced = {name: _replaced(array, rows, again.get(name)) for name, array in answer.items()}
    return replaced, Escalation(len(rows), OVERFLOW_CAUSES[int(flags.max())])


def _reference(model: ServedModel, lane: Lane) -> Lane:
    """The lane whose arithmetic holds what the tier's did not.

    Raises:
        NonfiniteOutput: there is none, or its device does not compute at FP32: its products
            would be as narrow as the tier's, and nothing would show it.
    """
    name = model.table.reference
    if name is None or name == lane.tier:
        raise NonfiniteOutput(
            "the answer overflowed the tier's number format, and there is no fp32 tier to compute it at"
        )
    found = model.lanes[name].description
    if found is not None and (found.unavailable is not None or _NARROW in found.effective):
        raise NonfiniteOutput(
            "the answer overflowed the tier's number format, and the fp32 tier's device has no FP32 products"
        )
    return model.lanes[name]


def _replaced(array: Array, rows: NDArray[np.intp], new_rows: Array | None) -> Array:
    if new_rows is None or new_rows.shape[1:] != array.shape[1:]:
        raise ModelError("the model's outputs have other shapes at the reference")
    # A copy: the tier's own answer is still to be compared with the reference's.
    whole = array.copy()
    whole[rows] = new_rows
    return whole
