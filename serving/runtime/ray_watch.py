"""Watches the processes of this run's own Ray: without one of them the server ends, and says why."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: Between two looks.
INTERVAL_S = 0.5
EXIT_STATUS = 1


@contextmanager
def ray_watched(node: Any, folder: Path) -> Iterator[None]:
    """End this process as soon as one of Ray's own has ended.

    Calls to a Ray whose control process is gone wait for a minute and then abort the process;
    a shutdown would do the same. So nothing is asked of it any more: what is left of it is
    killed, its folder removed, and the process ends with status 1.

    Args:
        node: Ray's own node, which started the processes.
        folder: this run's.
    """
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(node, folder, over, os._exit), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _watch(node: Any, folder: Path, over: threading.Event, end: Callable[[int], object]) -> None:
    while not over.wait(INTERVAL_S):
        dead = node.dead_processes()
        if not dead:
            continue
        names = ", ".join(f"{name} (exit status {process.poll()})" for name, process in dead)
        print(
            f"halftone: a process of Ray has ended: {names}; the server cannot go on without it and stops",
            file=sys.stderr,
            flush=True,
        )
        # Some of them would look for the dead one for a minute.
        below = _descendants(os.getpid())
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        end(EXIT_STATUS)
        return


def _descendants(pid: int) -> set[int]:
    """Every process below `pid`, now."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It has just ended.
            # The name, in parentheses, may hold anything; state and parent follow.
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
