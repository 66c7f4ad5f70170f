"""The TCP sockets of this process, those included that a library keeps to itself."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path


def listeners(port: int) -> Iterator[socket.socket]:
    """Handles on those that listen on a port, each closed when the next is asked for."""
    return (handle for handle in _sockets_on(port) if _is_listening(handle))


def connections(port: int) -> int:
    """How many connections to a port of its own the process holds."""
    return sum(not _is_listening(handle) for handle in _sockets_on(port))


def inode(handle: socket.socket) -> int:
    """What all handles on one socket have in common."""
    return os.fstat(handle.fileno()).st_ino


def _sockets_on(port: int) -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # Closed meanwhile.
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as handle:
                is_tcp = handle.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and handle.type == socket.SOCK_STREAM and handle.getsockname()[1] == port:
                    yield handle


def _is_listening(handle: socket.socket) -> bool:
    return handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
