"""Whether what a process holds grows: the slope that fits its samples, over the time that was watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtests.growth.figures import Figures, Sample, Watch

#: Growth that one process may show from the end of the warm-up to the end of the run, however long
#: that is: what allocators, caches and pools wander by. A longer run bounds growth more tightly.
BOUNDS: Mapping[str, float] = MappingProxyType(
    {"resident_mib": 8.0, "descriptors": 8.0, "threads": 4.0, "tasks": 16.0}
)
#: Metric series that may appear after the warm-up: rare reasons that it had none of.
MOST_NEW_SERIES = 8
#: For the fit, which compares all pairs.
_MOST_POINTS = 600
_FEWEST_POINTS = 5


@dataclass(frozen=True, slots=True)
class Growth:
    """One figure of one process.

    Attributes:
        first, last: fitted, at either end.
        bound: of last - first.
    """

    process: str
    figure: str
    first: float
    last: float
    bound: float

    @property
    def grows(self) -> bool:
        """Whether it is beyond its bound."""
        return self.last - self.first > self.bound

    def document(self) -> dict[str, Any]:
        """For reports."""
        rounded = {name: round(getattr(self, name), 2) for name in ("first", "last", "bound")}
        return {**asdict(self), **rounded, "growth": round(self.last - self.first, 2), "grows": self.grows}


def grown(watch: Watch, warmup_s: float) -> tuple[dict[str, Any], list[str]]:
    """What was watched, for a report, and what is wrong with it."""
    samples, problems, found = watch.samples, list(watch.failures), []
    try:
        found = growths(samples, warmup_s)
    except ValueError as error:
        problems.append(str(error))
    problems += [f"{one.process} grows: {one.document()}" for one in found if one.grows]
    start_s = samples[0].at_s + warmup_s if samples else 0.0
    early = frozenset[str]().union(*(sample.series for sample in samples if sample.at_s <= start_s))
    new = sorted(samples[-1].series - early) if samples else []
    if len(new) > MOST_NEW_SERIES:
        problems.append(f"{len(new)} new metric series, as in {new[:5]}")
    counts = [len(sample.series) for sample in samples]
    report = {"series": {"counts": counts[:1] + counts[-1:], "new": new}}
    return {**report, "growth": [one.document() for one in found]}, problems


def growths(samples: Sequence[Sample], warmup_s: float) -> list[Growth]:
    """Every figure of every process, without the samples of the first `warmup_s`.

    Raises:
        ValueError: a process came or went meanwhile, or there are too few samples to fit anything.
    """
    start_s = samples[0].at_s + warmup_s if samples else 0.0
    kept = [sample for sample in samples if sample.at_s >= start_s]
    if len(kept) < _FEWEST_POINTS:
        raise ValueError(f"{len(kept)} samples after the warm-up are too few")
    kept = kept[:: -(-len(kept) // _MOST_POINTS)]
    names = kept[0].processes.keys()
    for sample in kept:
        if sample.processes.keys() != names:
            raise ValueError(f"processes came or went: {sorted(sample.processes.keys() ^ names)}")
    times_s = np.array([sample.at_s for sample in kept])
    found = []
    for name in names:
        for figure in Figures.__slots__:
            values = [getattr(sample.processes[name], figure) for sample in kept]
            if None not in values:
                first, last = fit(times_s, np.array(values, float))
                found.append(Growth(name, figure, first, last, BOUNDS[figure]))
    return found


def fit(times: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float]:
    """Where a straight line through the samples begins and ends.

    Its slope is the median of those between all pairs (Theil and Sen), which a few samples taken in the
    middle of a collection or a burst don't move. Growth that begins late moves it as little: the line ends
    no lower than the last quarter's median is above the first quarter's.
    """
    earlier, later = np.triu_indices(len(times), 1)
    slope = float(np.median((values[later] - values[earlier]) / (times[later] - times[earlier])))
    middle = float(np.median(values - slope * times))
    first, last = middle + slope * float(times[0]), middle + slope * float(times[-1])
    quarter = max(1, len(values) // 4)
    late = float(np.median(values[-quarter:]) - np.median(values[:quarter]))
    return first, max(last, first + late)
