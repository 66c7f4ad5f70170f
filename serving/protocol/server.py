"""Granian's HTTP server, embedded in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.server.embed import Server

from serving.errors import ConfigError, HalftoneError, TooManyConnections
from serving.protocol.doorman import Doorman
from serving.protocol.http import Response
from serving.protocol.own_sockets import close_door, inode, listeners
from serving.protocol.rsgi import RsgiApp
from serving.protocol.tls import check_certificate

HEADER_READ_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
#: Request line and headers together; the server answers 414 or 431 beyond it.
MAX_HEADER_BYTES = 65_536
MAX_CONNECTIONS = 1024
#: Connections that wait to be accepted.
BACKLOG = 1024
_START_TIMEOUT_S = 10.0
#: Between cancelling what still runs and giving up on it.
_CANCEL_GRACE_S = 1.0
_POLL_S = 0.002
#: From turning new connections away to closing the listener, for those that are open to send
#: their first request. Clients that were turned away try again after a second, so it costs none.
_LEAVE_DELAY_S = 0.8

_log = logging.getLogger(__name__)


class ServerError(HalftoneError):
    """The HTTP server could not start, or ended on its own."""


class EmbeddedServer:
    """An HTTP/1.1 server in this event loop, without signal handlers, WebSockets or logs.

    Several processes may listen on one port (`SO_REUSEPORT`): the kernel spreads connections.
    """

    def __init__(
        self,
        app: RsgiApp,
        host: str,
        port: int,
        *,
        header_read_timeout_s: float = HEADER_READ_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
        tls_certificate: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        """Prepare a server; nothing is opened yet.

        Args:
            app: What answers the requests.
            host: A name or an address of this machine.
            port: The port, or 0 for any free one; `port` tells which after `start`.
            header_read_timeout_s: How long the headers may take to arrive, and a connection be idle.
            write_timeout_s: How long a client may leave a response unread before it is dropped.
            max_connections: How many may be open. Others are answered 503; over TLS they are
                disconnected, some of them only after the time for a handshake.
            tls_certificate: The certificate chain in PEM. TLS needs both it and `tls_key`.
            tls_key: Its private key in PEM.

        Raises:
            ServerError: Only one of certificate and key is given.
        """
        if (tls_certificate is None) != (tls_key is None):
            raise ServerError("TLS needs both a certificate and a key")
        self.host = host
        self.port = port
        self._app = app
        self._header_read_timeout_ms = round(header_read_timeout_s * 1000)
        self._write_timeout_ms = round(write_timeout_s * 1000)
        self._tls = (tls_certificate, tls_key)
        self._max_connections = max_connections
        self._doorman: Doorman | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """Whether it was started and has not ended since."""
        return self._serving is not None and not self._serving.done()

    async def start(self) -> None:
        """Listen. Returns once connections are accepted.

        Raises:
            ServerError: The address cannot be resolved or bound, nothing listens in time, or
                certificate and key are not what they should be.
        """
        if self._serving is not None:
            raise ServerError("the server has been started already")
        self._check_certificate()
        address = await _resolve(self.host)
        with contextlib.ExitStack() as reservation:
            if self.port == 0:
                self.port = reservation.enter_context(_reserve_port(address))
            before = _listener_inodes(self.port)
            self._server = self._make_server(address)
            self._serving = asyncio.get_running_loop().create_task(self._server.serve())
            opened = await self._until_listening(before)
        for handle in listeners(self.port):
            if inode(handle) in opened:
                _set_write_timeout(handle, self._write_timeout_ms)
                refusal = None if self._tls[0] else self._refusal
                self._doorman = Doorman(handle.fileno(), self._max_connections, refusal)

    def _refusal(self) -> Response:
        return self._app.refusal(TooManyConnections("the server has as many connections as it takes"))

    def _dismiss_doorman(self) -> None:
        if self._doorman is not None:
            self._doorman.close()
            self._doorman = None

    def _check_certificate(self) -> None:
        # They may have changed since the configuration was checked: renewed, one after the other.
        certificate, key = self._tls
        if certificate is not None and key is not None:
            try:
                check_certificate(certificate, key)
            except ConfigError as error:
                raise ServerError(f"cannot speak TLS: {error}") from error

    def _make_server(self, address: str) -> Server:
        return Server(
            self._app,
            address=address,
            port=self.port,
            interface=Interfaces.RSGI,
            # Not "auto": while that waits for a protocol to show, a silent connection never times out.
            http=HTTPModes.http1,
            http1_settings=HTTP1Settings(
                header_read_timeout=self._header_read_timeout_ms, max_buffer_size=MAX_HEADER_BYTES
            ),
            websockets=False,
            backlog=BACKLOG,
            backpressure=self._max_connections,
            log_enabled=False,
            # Its constructor configures logging; not incrementally, that would close the
            # handlers of everybody else in the process.
            log_dictconfig={"incremental": True, "handlers": {}, "loggers": {}, "root": {}},
            ssl_cert=self._tls[0],
            ssl_key=self._tls[1],
            ssl_protocol_min=SSLProtocols.tls12,
        )

    async def _until_listening(self, before: set[int]) -> set[int]:
        """Wait until this process holds another listening socket on the port; its inode.

        Connecting would prove nothing: another process may listen on the same port.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (opened := _listener_inodes(self.port) - before):
            if self._serving is None or self._serving.done():
                raise ServerError(f"cannot listen on {self.host}:{self.port}: {self._failure()}")
            if time.monotonic() > deadline:
                await self.stop(0)
                raise ServerError(f"nothing listens on {self.host}:{self.port} after {_START_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)
        return opened

    def _failure(self) -> str:
        error = self._serving.exception() if self._serving and not self._serving.cancelled() else None
        # The server appends a native stack trace to its sentence.
        return str(error).partition("\n")[0] if error else "the server ended"

    async def leave(self, timeout_s: float) -> bool:
        """Stop, while other processes go on listening on the port.

        Connections that wait to be accepted when a listener closes are reset, and those that have
        asked for nothing yet are closed. So for a moment before, no new ones come in: their
        clients try again after a second, and find the others.

        Args:
            timeout_s: as for `stop`.

        Returns:
            Whether everything finished in time.
        """
        self._dismiss_doorman()
        for handle in listeners(self.port):
            try:
                close_door(handle)
            except OSError:  # No filters in this kernel. So all but one at a time.
                handle.listen(0)
        await asyncio.sleep(_LEAVE_DELAY_S)
        return await self.stop(timeout_s)

    async def stop(self, timeout_s: float) -> bool:
        """Refuse new connections at once, finish what is in flight, close.

        Args:
            timeout_s: How long to wait before what is still in flight is cancelled.

        Returns:
            Whether everything finished in time.
        """
        if self._server is None or self._serving is None:
            return True
        self._dismiss_doorman()
        serving, self._serving = self._serving, None
        if not serving.done():
            self._server.stop()
            await asyncio.wait({serving}, timeout=timeout_s)
        finished = serving.done()
        if not finished:
            self._app.cancel_running()
            await asyncio.wait({serving}, timeout=_CANCEL_GRACE_S)
        if not serving.done():
            _log.warning("connections were still open %g s after the server was stopped", timeout_s)
        elif not serving.cancelled() and (error := serving.exception()) is not None:
            _log.error("the HTTP server failed: %s", str(error).partition("\n")[0])
        return finished


async def _resolve(host: str) -> str:
    """The numeric address of a host; the server itself takes no names."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerError(f"cannot resolve {host}: {error.strerror or error}") from None
    # IPv4 first, as `localhost` means for most clients.
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


@contextlib.contextmanager
def _reserve_port(address: str) -> Iterator[int]:
    """A free port, held (bound, not listening) until the server has bound it as well."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((address, 0))
        except OSError as error:
            raise ServerError(f"cannot listen on {address}: {error.strerror}") from None
        yield holder.getsockname()[1]


def _listener_inodes(port: int) -> set[int]:
    return {inode(handle) for handle in listeners(port)}


def _set_write_timeout(handle: socket.socket, timeout_ms: int) -> None:
    """Have the kernel drop connections whose peer stops reading; accepted sockets inherit it."""
    handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
