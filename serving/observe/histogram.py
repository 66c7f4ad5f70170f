"""A histogram that takes single figures fast and many at once, each series with buckets of its own."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from serving.observe.snapshot import Exemplar, Key, KeyedMetric, Samples, number_text


class BulkHistogram(Collector):
    """Like `prometheus_client.Histogram`, without locks: every figure comes from one event loop.

    Figures that are NaN or infinite are not taken: one of them would spoil the sum for ever.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def series(self, labels: tuple[str, ...], bounds: Sequence[float] | NDArray[np.float64]) -> Series:
        """The series of some label values, in the order of the histogram's labels.

        `bounds` are the upper ends of its buckets, ascending; those of the first call count.
        """
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = Series(
                self._name, dict(zip(self._labels, labels, strict=True)), [float(bound) for bound in bounds]
            )
        return series

    def describe(self) -> Iterator[KeyedMetric]:
        """The family, without series."""
        yield KeyedMetric(self._name, self._documentation, "histogram", {})

    def collect(self) -> Iterator[KeyedMetric]:
        """The family and its series."""
        metric = KeyedMetric(self._name, self._documentation, "histogram", {})
        for series in self._series.values():
            metric.keyed_samples.update(series.samples())
            metric.exemplars.update(series.exemplars())
        yield metric


class Series:
    """One set of label values."""

    def __init__(self, name: str, labels: Mapping[str, str], bounds: list[float]) -> None:
        ends = [*map(number_text, bounds), "+Inf"]
        self._bounds = bounds
        self._counts = [0] * len(ends)
        self._total = 0.0
        #: By bucket, the last request that it counted and that can be looked up.
        self._exemplars: dict[int, Exemplar] = {}
        #: Of every bucket, the count and the sum, in the order of their values.
        self._keys: list[Key] = [
            *((f"{name}_bucket", tuple(sorted({**labels, "le": end}.items()))) for end in ends),
            (f"{name}_count", tuple(sorted(labels.items()))),
            (f"{name}_sum", tuple(sorted(labels.items()))),
        ]

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Count a finite figure. A request's own figures are counted here: it must cost little.

        `exemplar` are labels by which the request can be found.
        """
        place = bisect_left(self._bounds, value)  # the first bound that is not below it
        self._counts[place] += 1
        self._total += value
        if exemplar is not None:
            self._exemplars[place] = Exemplar(tuple(sorted(exemplar.items())), value, time.time())

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Count those of many figures that are finite."""
        finite = values[np.isfinite(values)]
        found = np.bincount(np.searchsorted(self._bounds, finite), minlength=len(self._counts))
        self._counts = [count + new for count, new in zip(self._counts, found.tolist(), strict=True)]
        self._total += float(finite.sum())

    def samples(self) -> Samples:
        """Cumulative counts of the buckets, the count and the sum."""
        cumulative = [float(count) for count in accumulate(self._counts)]
        return dict(zip(self._keys, [*cumulative, cumulative[-1], self._total], strict=True))

    def exemplars(self) -> dict[Key, Exemplar]:
        """Of some of its buckets."""
        return {self._keys[place]: exemplar for place, exemplar in self._exemplars.items()}


def log_spaced(least: float, largest: float, per_decade: int) -> NDArray[np.float64]:
    """Bucket ends from `least` to `largest`, rounded to four digits so that they read well."""
    count = round(np.log10(largest / least) * per_decade)
    exponents = np.log10(least) + np.arange(count + 1) / per_decade
    return np.array([float(f"{10**exponent:.3e}") for exponent in exponents])
