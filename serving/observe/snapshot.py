"""What a registry holds at one moment, as plain data that travels between processes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Exemplar as ClientExemplar
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

#: Sample name and sorted labels.
Key = tuple[str, tuple[tuple[str, str], ...]]
Samples = dict[Key, float]

#: Series of one process, several times over: keys are made once for each.
_MAX_KEYS = 65_536


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One request that a bucket counted, by which it can be found in logs and traces."""

    labels: tuple[tuple[str, str], ...]
    value: float
    timestamp_s: float


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family of a snapshot."""

    name: str
    type: str
    documentation: str
    samples: Samples
    #: Of some of its buckets.
    exemplars: dict[Key, Exemplar] = field(default_factory=dict)

    @property
    def is_cumulative(self) -> bool:
        """Whether values only grow, so that those of dead processes still count."""
        return self.type in {"counter", "histogram"}


#: A registry's families at one moment.
Snapshot = tuple[Family, ...]


class KeyedMetric(Metric):
    """A family that knows its samples by key: one of thousands of buckets need not build them first."""

    def __init__(self, name: str, documentation: str, kind: str, keyed_samples: Samples) -> None:
        self.keyed_samples = keyed_samples
        self.exemplars: dict[Key, Exemplar] = {}
        super().__init__(name, documentation, kind)

    @property
    def samples(self) -> list[Sample]:
        """As any collector's, built when somebody asks for them."""
        return [Sample(name, dict(labels), value) for (name, labels), value in self.keyed_samples.items()]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """The base class starts with none."""


def number_text(value: float) -> str:
    """A value or a bucket's end as Prometheus writes it."""
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def take_snapshot(registry: CollectorRegistry) -> Snapshot:
    """Every family of a registry, without the `_created` timestamps."""
    return tuple(_family(metric) for metric in registry.collect())


def _family(metric: Metric) -> Family:
    if isinstance(metric, KeyedMetric):
        return Family(metric.name, metric.type, metric.documentation, metric.keyed_samples, metric.exemplars)
    samples: Samples = {}
    exemplars: dict[Key, Exemplar] = {}
    for sample in metric.samples:
        if sample.name.endswith("_created"):
            continue
        key = _key(sample.name, *sample.labels.items())
        samples[key] = float(sample.value)
        if sample.exemplar is not None:
            exemplars[key] = _exemplar(sample.exemplar)
    return Family(metric.name, metric.type, metric.documentation, samples, exemplars)


@lru_cache(_MAX_KEYS)
def _key(name: str, *labels: tuple[str, str]) -> Key:
    return name, tuple(sorted(labels))


def _exemplar(exemplar: ClientExemplar) -> Exemplar:
    labels = tuple(sorted(exemplar.labels.items()))
    return Exemplar(labels, exemplar.value, float(exemplar.timestamp or 0.0))


class Merger:
    """Adds snapshots up.

    Histograms' sums are added exactly and rounded once: in whatever order snapshots come, from
    one hub or the next, the same ones give the same figure. Off by its last digit, a sum would
    fall, and Prometheus take that for a counter that began anew.
    """

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        #: What histograms' sums are made of.
        self.sums: dict[Key, list[float]] = {}

    def add(self, snapshot: Iterable[Family], *, alive: bool) -> None:
        """Add a snapshot. Of a dead process, only what is cumulative."""
        for family in snapshot:
            into = self._families.get(family.name)
            if into is None:
                into = self._families[family.name] = Family(
                    family.name, family.type, family.documentation, {}
                )
            if not (alive or family.is_cumulative):
                continue
            self._add_samples(into, family)
            for key, exemplar in family.exemplars.items():
                known = into.exemplars.get(key)
                if known is None or known.timestamp_s < exemplar.timestamp_s:
                    into.exemplars[key] = exemplar

    def _add_samples(self, into: Family, family: Family) -> None:
        if family.type == "histogram":
            sum_name = f"{family.name}_sum"
            for key, value in family.samples.items():
                if key[0] == sum_name:
                    self.sums.setdefault(key, []).append(value)
        if not into.samples:
            into.samples.update(family.samples)
        elif family.name.endswith("_info"):
            into.samples.update(family.samples)  # The same fact from several processes is one fact.
        else:
            known = into.samples
            for key, value in family.samples.items():
                known[key] = known.get(key, 0.0) + value

    def families(self) -> list[Family]:
        """The sums, by name. Call it once."""
        for (name, labels), parts in self.sums.items():
            self._families[name.removesuffix("_sum")].samples[name, labels] = math.fsum(parts)
        return [self._families[name] for name in sorted(self._families)]


def fold(into: Snapshot, snapshot: Snapshot) -> Snapshot:
    """Cumulative families, added for good: sums are rounded up, never down, so that no total falls."""
    merger = Merger()
    merger.add(into, alive=False)
    merger.add(snapshot, alive=False)
    families = merger.families()
    for key, parts in merger.sums.items():
        family = next(family for family in families if f"{family.name}_sum" == key[0])
        if Fraction(family.samples[key]) < sum(map(Fraction, parts)):
            family.samples[key] = math.nextafter(family.samples[key], math.inf)
    return cumulative(tuple(families))


def cumulative(snapshot: Snapshot) -> Snapshot:
    """What still counts once the process is gone."""
    return tuple(family for family in snapshot if family.is_cumulative)
