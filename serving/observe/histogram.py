"""A histogram that takes many figures at once, each series with buckets of its own fineness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class BulkHistogram(Collector):
    """Like `prometheus_client.Histogram`, for arrays of figures.

    Figures that are NaN or infinite are not taken: one of them would spoil the sum for ever.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], _Series] = {}
        registry.register(self)

    def observe(
        self, labels: tuple[str, ...], bounds: NDArray[np.float64], values: NDArray[np.float64]
    ) -> None:
        """Take figures.

        Args:
            labels: values, in the order of the histogram's labels.
            bounds: upper ends of the buckets, ascending; those of the series' first call count.
            values: the figures.
        """
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = _Series(bounds)
        series.observe(values[np.isfinite(values)])

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The family, without series."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The family and its series."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, series in self._series.items():
            family.add_metric(labels, series.buckets(), series.total)
        yield family


class _Series:
    """One set of label values."""

    def __init__(self, bounds: NDArray[np.float64]) -> None:
        self._bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0

    def observe(self, values: NDArray[np.float64]) -> None:
        """Count finite figures."""
        places = np.searchsorted(self._bounds, values)  # the first bound that is not below the figure
        self._counts += np.bincount(places, minlength=len(self._counts))
        self.total += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Upper end and cumulative count of each bucket."""
        ends = [repr(float(bound)) for bound in self._bounds]
        return list(zip([*ends, "+Inf"], np.cumsum(self._counts).astype(float).tolist(), strict=True))


def log_spaced(least: float, largest: float, per_decade: int) -> NDArray[np.float64]:
    """Bucket ends from `least` to `largest`, rounded to four digits so that they read well."""
    count = round(np.log10(largest / least) * per_decade)
    exponents = np.log10(least) + np.arange(count + 1) / per_decade
    return np.array([float(f"{10**exponent:.3e}") for exponent in exponents])
