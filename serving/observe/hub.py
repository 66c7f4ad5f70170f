"""The hub: merges every process's metrics into one page.

Each process pushes a snapshot of its registry, cumulative since that process started. The
hub keeps the last one of each. Counters and histograms are the sums over all processes
that ever pushed, alive or not, so that no total falls when a process dies. Gauges are
those of live processes only. Nothing is on a disk, so processes may be on any node.

The hub itself is one process. If it restarts, the live processes push again within a
second; totals of processes that had died by then are gone, which Prometheus sees as a
counter reset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

PLAIN_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

#: A process that has not pushed for this long is dead; it pushes every second.
STALE_AFTER_S = 5.0
#: Dead processes whose totals are kept apart, in case one was only stalled and returns.
MAX_DEAD_PROCESSES = 64

#: name and sorted labels -> value
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family of a snapshot."""

    name: str
    type: str
    documentation: str
    samples: Samples

    @property
    def is_cumulative(self) -> bool:
        """Whether values only grow, so that those of dead processes still count."""
        return self.type in {"counter", "histogram"}


#: A registry's families at one moment: plain data, to be sent between processes.
Snapshot = tuple[Family, ...]


def take_snapshot(registry: CollectorRegistry) -> Snapshot:
    """Every family of a registry, without the `_created` timestamps."""
    return tuple(
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for sample in metric.samples
                if not sample.name.endswith("_created")
            },
        )
        for metric in registry.collect()
    )


@dataclass(slots=True)
class _Process:
    snapshot: Snapshot
    last_seen_s: float


@dataclass(slots=True)
class Hub:
    """Snapshots by process, and the page made of them."""

    clock: Callable[[], float] = time.monotonic
    stale_after_s: float = STALE_AFTER_S
    _processes: dict[str, _Process] = field(default_factory=dict)
    #: Totals of processes that died long ago.
    _archive: dict[str, Family] = field(default_factory=dict)

    def push(self, process: str, snapshot: Snapshot) -> None:
        """Take a process's snapshot. `process` is unique to one life of one process."""
        self._processes[process] = _Process(snapshot, self.clock())
        self._archive_the_long_dead()

    def is_alive(self, process: str) -> bool:
        """Whether the process pushed lately."""
        return process in self._processes and self._is_alive(self._processes[process])

    def merged(self) -> list[Family]:
        """All families, summed over processes."""
        families: dict[str, Family] = {
            name: Family(name, family.type, family.documentation, dict(family.samples))
            for name, family in self._archive.items()
        }
        for process in self._processes.values():
            _add(families, process.snapshot, alive=self._is_alive(process))
        return [families[name] for name in sorted(families)]

    def render(self, openmetrics: bool = False) -> bytes:
        """The page, in Prometheus text format or in OpenMetrics."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self.merged()))
        page: bytes = (generate_openmetrics if openmetrics else generate_latest)(registry)
        return page

    def _is_alive(self, process: _Process) -> bool:
        return self.clock() - process.last_seen_s <= self.stale_after_s

    def _archive_the_long_dead(self) -> None:
        dead = [name for name, process in self._processes.items() if not self._is_alive(process)]
        dead.sort(key=lambda name: self._processes[name].last_seen_s)
        for name in dead[: max(0, len(dead) - MAX_DEAD_PROCESSES)]:
            _add(self._archive, self._processes.pop(name).snapshot, alive=False)


def _add(families: dict[str, Family], snapshot: Iterable[Family], alive: bool) -> None:
    """Add a snapshot to the families in place. Of a dead process, only what is cumulative."""
    for family in snapshot:
        into = families.setdefault(family.name, Family(family.name, family.type, family.documentation, {}))
        if not (alive or family.is_cumulative):
            continue
        for key, value in family.samples.items():
            if family.name.endswith("_info"):
                into.samples[key] = 1.0  # The same fact from several processes is one fact.
            else:
                into.samples[key] = into.samples.get(key, 0.0) + value


@dataclass(eq=False, slots=True)
class _Families(Collector):
    """Merged families, as the exposition code of prometheus_client wants them."""

    families: list[Family]

    def collect(self) -> Iterator[Metric]:
        for family in self.families:
            metric = Metric(family.name, family.documentation, family.type)
            for (name, labels), value in family.samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric
