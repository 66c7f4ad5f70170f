"""The socket that a server listens on, which others share."""

from __future__ import annotations

import ctypes
import socket
import struct

#: Connections that wait to be accepted.
BACKLOG = 1024
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


def listen(address: str, port: int, write_timeout_ms: int) -> socket.socket:
    """A listener on a numeric address; processes that all open theirs so may share the port.

    Args:
        address: of this machine.
        port: 0 for any that is free.
        write_timeout_ms: for how long the peer of an accepted connection may leave what it is sent
            unread, before the kernel drops it (`TCP_USER_TIMEOUT`).

    Raises:
        OSError: it cannot be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted sockets inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, write_timeout_ms)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


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
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:  # No filters in this kernel. So all but one at a time.
        listener.listen(0)
