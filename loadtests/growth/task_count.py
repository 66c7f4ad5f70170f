"""How many asyncio tasks a gateway has: no figure of the operating system tells, so a watched model does.

`Watched` is the embedded echo, of which a gateway asks the batch key of each request on its event loop.
There it notes the loop's tasks, once a second at most.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from serving.models.echo import Echo
from serving.tensors import Tensors

INTERVAL_S = 0.5


class Watched(Echo):
    """The echo; leaves its gateway's number of tasks in the server's temporary folder."""

    def __init__(self) -> None:
        self._noted_s = 0.0

    def batch_key(self, tensors: Tensors) -> object:
        """As usual."""
        now_s = time.monotonic()
        if now_s - self._noted_s > INTERVAL_S:
            self._noted_s = now_s
            note_tasks(Path(tempfile.gettempdir()), len(asyncio.all_tasks()))
        return super().batch_key(tensors)


def note_tasks(folder: Path, count: int) -> None:
    """For `tasks_of`, which sees this number or the one before, and never half of one."""
    target = _file(folder, os.getpid())
    target.with_suffix(".new").write_text(str(count))
    target.with_suffix(".new").replace(target)


def tasks_of(folder: Path, pid: int) -> int | None:
    """What a process noted last; None where it has no watched model."""
    try:
        return int(_file(folder, pid).read_text())
    except FileNotFoundError:
        return None


def _file(folder: Path, pid: int) -> Path:
    return folder / f"asyncio-tasks-{pid}"
