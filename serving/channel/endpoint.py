"""Where a replica listens, and which of its addresses a gateway can reach."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

#: A Linux socket without a file: it is gone with its process, however that ends.
_ABSTRACT = "\0"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica's listening addresses."""

    #: `MODEL:TIER`, the name of its deployment.
    tier: str
    #: Unique to one life of one replica.
    replica: str
    #: Where `ipc_name` can be reached.
    host: str
    #: Name of an abstract Unix socket, without its leading NUL.
    ipc_name: str
    #: For gateways elsewhere; None where the replica listens on its own host only.
    tcp: tuple[str, int] | None = None

    def address(self, host: str) -> str | tuple[str, int] | None:
        """What a gateway on `host` connects to: a Unix path, a TCP address, or nothing."""
        return _ABSTRACT + self.ipc_name if host == self.host else self.tcp


def new_ipc_name() -> str:
    """A name that nobody can guess: a stranger could not even knock."""
    return f"halftone-{secrets.token_hex(16)}"


def listening_ipc_socket(name: str) -> socket.socket:
    """A bound abstract socket."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(_ABSTRACT + name)
    return found


def connected_ipc_socket(path: str) -> socket.socket:
    """A socket connected to an abstract path.

    Raises:
        OSError: nothing listens there, or its queue of connections is full.
    """
    # Event loops differ in whether they take an abstract path; this never waits.
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.setblocking(False)
    try:
        found.connect(path)
    except OSError:
        found.close()
        raise
    return found


def this_host() -> str:
    """What processes that share abstract Unix sockets have in common: kernel and network namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}"
