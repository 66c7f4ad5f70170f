"""The hub: merges every process's metrics into one page.

Each process pushes a snapshot of its registry, cumulative since that process started. The
hub keeps the last one of each. Counters and histograms are the sums over all processes
that ever pushed, alive or not, so that no total falls when a process dies. Gauges are
those of live processes only. Nothing is on a disk, so processes may be on any node.

The hub itself is one process, and may be replaced too. What only it knows, the totals of
the dead (`Past`), it hands to the processes that push to it; they hand it on to the next
hub, which shows no page until it has heard of every process that the last hub knew alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from serving.observe.page import PageWriter
from serving.observe.snapshot import Family, Merger, Snapshot, cumulative, fold

#: A process that has not pushed for this long is dead; it pushes every half a second.
STALE_AFTER_S = 5.0
#: One that missed two pushes may be dead: its totals are handed on before that is certain.
SILENT_AFTER_S = 1.5
#: Dead processes whose totals are kept apart, in case one was only stalled and returns.
MAX_DEAD_PROCESSES = 16
#: Names of processes whose totals are no longer kept apart.
MAX_FORGOTTEN_NAMES = 10_000
#: From a hub's first push: the others push meanwhile, and hand on what they know.
SETTLE_S = 1.2


class Forgotten(Exception):
    """A process returns whose totals are no longer kept apart: it would be counted twice."""


class Past(msgspec.Struct, frozen=True):
    """What a hub's successor must know, and no live process could tell it."""

    #: The hub's own name, unique to its life.
    hub: str
    #: Ascending, of one hub.
    version: int
    #: The other processes.
    alive: tuple[str, ...]
    #: Cumulative families of processes that are silent, dead or not, and of the hub itself.
    silent: dict[str, Snapshot]
    #: The sum of those that died before them, ...
    folded: Snapshot
    #: ... how many they are, ...
    folded_processes: int
    #: ... and the names of the last ones.
    folded_names: tuple[str, ...]


class _Process:
    """The last that was heard of a process."""

    __slots__ = ("kept_version", "known_since_s", "last_seen_s", "left_version", "snapshot")

    def __init__(self, snapshot: Snapshot, last_seen_s: float, known_since_s: float) -> None:
        self.snapshot = snapshot
        self.last_seen_s = last_seen_s
        #: When this hub heard of it first, from itself or from what another one kept.
        self.known_since_s = known_since_s
        #: The version of the past that it was given last.
        self.kept_version = 0
        #: The first version that holds its last figures; None unless it said that they are.
        self.left_version: int | None = None


class Hub:
    """Snapshots by process, and the page made of them."""

    def __init__(
        self,
        name: str = "hub",
        *,
        clock: Callable[[], float] = time.monotonic,
        stale_after_s: float = STALE_AFTER_S,
        settle_s: float = 0.0,
    ) -> None:
        """Make a hub.

        Args:
            name: unique to this life of this hub.
            clock: seconds.
            stale_after_s: silence after which a process is dead.
            settle_s: from the first push until the page may be shown.
        """
        self.name = name
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._settle_s = settle_s
        self._started_s: float | None = None
        self._writer = PageWriter()
        self._processes: dict[str, _Process] = {}
        self._own: Snapshot = ()
        #: Of hubs before this one: who ought to push before the page is shown.
        self._expected: set[str] = set()
        self._folded: Snapshot = ()
        self._folded_processes = 0
        self._folded_names: dict[str, None] = {}
        self._version = 0
        self._known: tuple[object, ...] = ()
        self._encoded = (0, b"")

    def push(self, process: str, snapshot: Snapshot, *, is_last: bool = False) -> None:
        """Take a process's snapshot.

        Args:
            process: unique to one life of one process.
            snapshot: cumulative since it began.
            is_last: the process ends, and counts nothing more.

        Raises:
            Forgotten: it was silent for so long that it must start anew.
        """
        if process in self._folded_names:
            raise Forgotten(process)
        if self._started_s is None:
            self._started_s = self._clock()
        now_s = self._clock()
        known = self._processes.setdefault(process, _Process(snapshot, now_s, now_s))
        known.snapshot, known.last_seen_s = snapshot, now_s
        if is_last and known.left_version is None:
            known.left_version = self.version + 1
        self._expected.discard(process)
        self._fold_the_long_dead()

    def push_own(self, snapshot: Snapshot) -> None:
        """Take the figures of the hub's own process."""
        self._own = snapshot

    def expect(self, name: str, *, no_more: bool = False) -> None:
        """Show no page until something was heard, or `no_more`."""
        (self._expected.discard if no_more else self._expected.add)(name)

    def is_alive(self, process: str) -> bool:
        """Whether the process pushed lately."""
        return process in self._processes and self._is_alive(self._processes[process])

    @property
    def is_settled(self) -> bool:
        """Whether the page is whole: every process that ought to push has had the time to."""
        if self._started_s is None:
            return self._settle_s == 0
        age_s = self._clock() - self._started_s
        return age_s >= self._stale_after_s or (age_s >= self._settle_s and not self._expected)

    def merged(self) -> list[Family]:
        """All families, summed over processes."""
        merger = Merger()
        merger.add(self._folded, alive=False)
        for process in self._processes.values():
            merger.add(process.snapshot, alive=self._is_alive(process))
        merger.add(self._own, alive=True)
        return merger.families()

    def processes(self) -> list[str]:
        """Live processes, the hub's own among them."""
        return [name for name in self._processes if self.is_alive(name)] + [self.name]

    def render_process(self, process: str, openmetrics: bool = False) -> bytes | None:
        """One live process's own page; None where there is no such process."""
        if process == self.name:
            return self._writer.write(self._own, openmetrics=openmetrics)
        if not self.is_alive(process):
            return None
        return self._writer.write(self._processes[process].snapshot, openmetrics=openmetrics)

    def render(self, openmetrics: bool = False) -> bytes:
        """The page, in Prometheus text format or in OpenMetrics."""
        return self._writer.write(self.merged(), openmetrics=openmetrics)

    @property
    def version(self) -> int:
        """Of the past: another one when another process fell silent, or the hub counted something."""
        silent = tuple((name, process.last_seen_s) for name, process in self._silent().items())
        others = len(self._processes) - len(silent)
        own = tuple(tuple(family.samples.values()) for family in cumulative(self._own))
        known = (silent, others, own, self._folded_processes)
        if known != self._known:
            self._known = known
            self._version += 1
        return self._version

    def is_kept(self, process: str) -> bool:
        """Whether the last figures of a process that ends are with another one, if there is any."""
        left_version = self._processes[process].left_version
        others = [
            other.kept_version
            for name, other in self._processes.items()
            if name != process and other.left_version is None and self._is_alive(other)
        ]
        return left_version is not None and max(others, default=left_version) >= left_version

    def past(self, process: str | None = None) -> bytes:
        """What the next hub must know, encoded, for a process to keep."""
        version, silent = self.version, self._silent()
        if process in self._processes:
            self._processes[process].kept_version = version
        if self._encoded[0] != version:
            past = Past(
                self.name,
                version,
                tuple(name for name in self._processes if name not in silent),
                {
                    **{name: cumulative(process.snapshot) for name, process in silent.items()},
                    self.name: cumulative(self._own),
                },
                self._folded,
                self._folded_processes,
                tuple(self._folded_names),
            )
            self._encoded = (version, msgspec.msgpack.encode(past))
        return self._encoded[1]

    def _silent(self) -> dict[str, _Process]:
        oldest_s = self._clock() - SILENT_AFTER_S
        return {
            name: process
            for name, process in self._processes.items()
            if process.last_seen_s < oldest_s or process.left_version is not None
        }

    def restore(self, encoded: bytes) -> None:
        """Take over the past of another hub. What is known already is not counted again."""
        past = msgspec.msgpack.decode(encoded, type=Past)
        if past.hub == self.name:
            return
        if past.folded_processes > self._folded_processes:
            # Hubs hand on what they were handed: the larger sum holds the smaller one.
            self._folded = past.folded
            self._folded_processes = past.folded_processes
            self._folded_names = dict.fromkeys(past.folded_names)
            for name in self._folded_names:
                self._processes.pop(name, None)
        for name, snapshot in past.silent.items():
            self._restore_process(name, snapshot)
        self._expected.update(set(past.alive) - self._processes.keys() - self._folded_names.keys())

    def _restore_process(self, name: str, snapshot: Snapshot) -> None:
        if name == self.name or name in self._folded_names or self.is_alive(name):
            return
        known = self._processes.get(name)
        if known is None or _size(snapshot) > _size(known.snapshot):
            # Dead until it pushes, as it may: the last hub did not know for certain.
            now_s = self._clock()
            self._processes[name] = _Process(snapshot, now_s - self._stale_after_s - 1, now_s)

    def _is_alive(self, process: _Process) -> bool:
        return self._clock() - process.last_seen_s <= self._stale_after_s

    def _fold_the_long_dead(self) -> None:
        newest_s = self._clock() - self._stale_after_s
        dead = [
            name
            for name, process in self._processes.items()
            if not self._is_alive(process) and process.known_since_s < newest_s
        ]
        dead.sort(key=lambda name: self._processes[name].last_seen_s)
        for name in dead[: max(0, len(dead) - MAX_DEAD_PROCESSES)]:
            self._folded = fold(self._folded, self._processes.pop(name).snapshot)
            self._folded_processes += 1
            self._folded_names[name] = None
            if len(self._folded_names) > MAX_FORGOTTEN_NAMES:
                del self._folded_names[next(iter(self._folded_names))]


def _size(snapshot: Iterable[Family]) -> float:
    """The later of two cumulative snapshots of one process is the larger one."""
    return sum(sum(family.samples.values()) for family in snapshot if family.is_cumulative)
