"""`Watch`: looks at a server's processes, again and again, while something else loads it."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtests.footprint import processes
from loadtests.growth.task_count import tasks_of

#: Without the method that Ray appends while it runs one.
_TITLE = re.compile(r"halftone:[\w:-]+")
#: The process that was started, and its name in reports.
SERVE = "halftone serve"


@dataclass(frozen=True, slots=True)
class Figures:
    """What one process holds at one moment.

    Attributes:
        tasks: asyncio's, where a watched model counts them; None: not known.
    """

    resident_mib: float
    descriptors: int
    threads: int
    tasks: int | None


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes at one moment, by name and number, and the series on `/metrics`."""

    at_s: float
    processes: dict[str, Figures]
    series: frozenset[str]


class Watch:
    """Samples every `interval_s`, from a thread of its own.

    Args:
        url: of the server, as in `http://127.0.0.1:8000`.
        pid: of `halftone serve`.
        tasks_folder: where watched models leave their counts.
    """

    def __init__(self, url: str, pid: int, tasks_folder: Path, interval_s: float = 1.0) -> None:
        self.samples: list[Sample] = []
        #: Samples that could not be taken, and why: a process ended, `/metrics` did not answer.
        self.failures: list[str] = []
        self._url, self._pid, self._tasks_folder, self._interval_s = url, pid, tasks_folder, interval_s

    @contextmanager
    def running(self) -> Iterator[Watch]:
        """Samples until the block ends, one at either end included."""
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,))
        thread.start()
        try:
            yield self
        finally:
            over.set()
            thread.join()

    def _run(self, over: threading.Event) -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(self._interval_s if self.samples else 0.0)
            try:
                self.samples.append(self.look())
            except (OSError, LookupError) as error:
                self.failures.append(repr(error))

    def look(self) -> Sample:
        """One sample.

        Raises:
            OSError: `/metrics` does not answer, or a process has just ended.
        """
        found = {SERVE: self._pid}
        for pid in processes.descendants(self._pid):
            title = _TITLE.search(processes.command_line(pid))
            if title is not None:
                found[f"{title[0]} {pid}"] = pid
        figures = {name: self._figures(pid) for name, pid in sorted(found.items())}
        return Sample(time.monotonic(), figures, self._series())

    def _figures(self, pid: int) -> Figures:
        folder = Path(f"/proc/{pid}")
        return Figures(
            resident_mib=processes.resident_bytes(pid) / 2**20,
            descriptors=sum(1 for _ in (folder / "fd").iterdir()),
            threads=sum(1 for _ in (folder / "task").iterdir()),
            tasks=tasks_of(self._tasks_folder, pid),
        )

    def _series(self) -> frozenset[str]:
        with contextlib.closing(urllib.request.urlopen(f"{self._url}/metrics", timeout=30)) as page:  # noqa: S310  Our own.
            lines = page.read().decode().splitlines()
        return frozenset(line.rpartition(" ")[0] for line in lines if line and not line.startswith("#"))
