"""The TCP sockets of this process, those included that a library keeps to itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

#: From <asm-generic/socket.h>; Python names it on no platform.
_SO_ATTACH_FILTER = 26
#: A filter in classic BPF (<linux/filter.h>): operation, jump if true, jump if false, operand.
#: A TCP listener's packets begin with the TCP header, whose byte 13 holds the flags; 2 is SYN.
_DROP_ATTEMPTS = (
    (0x30, 0, 0, 13),  # load the byte at 13
    (0x45, 0, 1, 2),  # with SYN in it, go on; else skip one
    (0x06, 0, 0, 0),  # keep nothing
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all
)


def listeners(port: int) -> Iterator[socket.socket]:
    """Handles on those that listen on a port, each closed when the next is asked for."""
    return (handle for handle in _sockets_on(port) if _is_listening(handle))


def close_door(listener: socket.socket) -> None:
    """Have the kernel drop every attempt to connect; connections that are open already live on.

    Clients try again by themselves, after a second at first (RFC 6298, section 2.1), and then
    find another process on the port, if this one's listener is closed by then.

    A backlog of zero would not do: it lets one connection wait at a time, so a server that goes
    on accepting takes in as many as before.
    """
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _DROP_ATTEMPTS)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions and their address.
    program = struct.pack("@HP", len(_DROP_ATTEMPTS), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


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
