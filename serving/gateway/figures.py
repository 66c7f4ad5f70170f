"""Figures on their way to the hub: each is told until the hub has it, and counted once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serving.gateway.precision_record import ModelFigures

#: While the hub is away, figures beyond these parcels stay with their models, which keep a bounded number.
MAX_UNTOLD_PARCELS = 4


@dataclass(frozen=True, slots=True)
class Parcel:
    """Figures that travel together."""

    #: Ascending, of one gateway.
    number: int
    #: By model.
    figures: Mapping[str, ModelFigures]


class Outbox:
    """A gateway's parcels that the hub may not have yet."""

    def __init__(self, take: Callable[[], Mapping[str, ModelFigures]]) -> None:
        """`take`: what was compared since it was called last."""
        self._take = take
        self._numbers = itertools.count(1)
        self._untold: dict[int, Parcel] = {}

    def parcels(self) -> tuple[Parcel, ...]:
        """Every parcel that the hub may lack, oldest first."""
        if len(self._untold) < MAX_UNTOLD_PARCELS:
            figures = {model: found for model, found in self._take().items() if found.is_any}
            if figures:
                parcel = Parcel(next(self._numbers), figures)
                self._untold[parcel.number] = parcel
        return tuple(self._untold.values())

    def told(self, parcels: tuple[Parcel, ...]) -> None:
        """The hub has them."""
        for parcel in parcels:
            self._untold.pop(parcel.number, None)
