"""A folder of one run's own, gone after it: also after a run that was killed, at the next start."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("halftone")

PREFIX = "halftone-"
#: Locked while the run lives. The system releases the lock however the process ends.
LOCK = "lock"
_UNFINISHED_LOCK = "lock.new"
#: A socket's path has at most 107 bytes, of which Ray's folders and names take about 70.
_MAX_FOLDER_LENGTH = 36


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of this user's alone, its path short enough for Ray's sockets."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _MAX_FOLDER_LENGTH - len(f"/{PREFIX}12345678"):
        parent = Path("/tmp")  # noqa: S108  mkdtemp makes a private folder in it.
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(folder / _UNFINISHED_LOCK, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under its own name only now: a run that starts at this moment takes nothing for abandoned.
        (folder / _UNFINISHED_LOCK).rename(folder / LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of runs of this user that were killed."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # Another user's, or gone meanwhile.
            if lock.is_symlink() or lock.stat().st_uid != os.getuid() or not _is_free(lock):
                continue
            logger.warning("removing %s, which a run that was killed has left", lock.parent)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _is_free(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
