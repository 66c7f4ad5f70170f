"""The HTTP server, embedded in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

from serving.errors import ConfigError, HalftoneError, TooManyConnections
from serving.protocol.http_app import HttpApp
from serving.protocol.http_connection import HttpConnection
from serving.protocol.listener import close_door, listen
from serving.protocol.tls import server_context
from serving.protocol.turned_away import TurnedAway
from serving.protocol.write_batch import WriteBatch

HEADER_READ_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 1024
#: Between cancelling what still runs and giving up on it.
_CANCEL_GRACE_S = 1.0
#: Between looks for clients that are late.
_SWEEP_INTERVAL_S = 0.1
#: Connections that are accepted before others have their turn.
_ACCEPT_BATCH = 64
#: Where no more can be accepted, because the process has no file for them, say.
_ACCEPT_PAUSE_S = 0.2
#: For one of too many connections to end, before those that wait for it are turned away.
_PATIENCE_S = 0.25
#: From turning new connections away to closing the listener, for those that are open to send
#: their first request. Clients that were turned away try again after a second, so it costs none.
_LEAVE_DELAY_S = 0.8

_log = logging.getLogger(__name__)


class ServerError(HalftoneError):
    """The HTTP server could not start, or ended on its own."""


class EmbeddedServer:
    """An HTTP/1.1 server in this event loop, without signal handlers, WebSockets or logs of requests.

    Several processes may listen on one port (`SO_REUSEPORT`): the kernel spreads connections.
    """

    def __init__(
        self,
        app: HttpApp,
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
            header_read_timeout_s: How long the headers may take to arrive, a connection be idle, and a
                TLS handshake take.
            write_timeout_s: How long a client may leave a response unread before it is dropped.
            max_connections: How many may be open. Others are answered 503; over TLS they are disconnected.
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
        self._header_read_timeout_s = header_read_timeout_s
        self._write_timeout_ms = round(write_timeout_s * 1000)
        self._tls = (tls_certificate, tls_key)
        self._tls_context: ssl.SSLContext | None = None
        self._max_connections = max_connections
        self._listener: socket.socket | None = None
        self._connections: set[HttpConnection] = set()
        #: Those whose client has not been greeted yet: over TLS, their handshake is under way.
        self._admissions: dict[asyncio.Task[None], HttpConnection] = {}
        self._writes = WriteBatch()
        self._turned_away = TurnedAway()
        #: Until when nobody is accepted.
        self._accept_pause: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._emptied = asyncio.Event()
        self._date = ""

    @property
    def is_serving(self) -> bool:
        """Whether it listens, and looks after its connections."""
        return self._listener is not None and self._sweeping is not None and not self._sweeping.done()

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections) + len(self._admissions)

    async def start(self) -> None:
        """Listen. Returns once connections are accepted.

        Raises:
            ServerError: The address cannot be resolved or bound, or certificate and key are not what
                they should be.
        """
        if self._listener is not None or self._sweeping is not None:
            raise ServerError("the server has been started already")
        self._load_certificate()
        address = await _resolve(self.host)
        try:
            self._listener = listen(address, self.port, self._write_timeout_ms)
        except OSError as error:
            reason = error.strerror or error
            raise ServerError(f"cannot listen on {self.host}:{self.port}: {reason}") from None
        self.port = self._listener.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._sweeping = loop.create_task(self._sweep())
        loop.add_reader(self._listener, self._accept)

    def _load_certificate(self) -> None:
        # They may have changed since the configuration was checked: renewed, one after the other.
        certificate, key = self._tls
        if certificate is not None and key is not None:
            try:
                self._tls_context = server_context(certificate, key)
            except ConfigError as error:
                raise ServerError(f"cannot speak TLS: {error}") from error

    def _accept(self) -> None:
        """Take in some of those that wait, as far as there is room."""
        for _ in range(_ACCEPT_BATCH):
            if self.connections >= self._max_connections:
                # One that goes now makes room for one that waits.
                self._pause_accepting(_PATIENCE_S, self._turn_away)
                return
            client = self._next_client()
            if client is None:
                return
            connection = HttpConnection(
                self._app, self._header_read_timeout_s, lambda: self._date, self._writes, self._lost
            )
            admission = asyncio.get_running_loop().create_task(self._admit(client, connection))
            self._admissions[admission] = connection
            admission.add_done_callback(functools.partial(self._admitted, client))

    def _next_client(self) -> socket.socket | None:
        """The next connection in the queue; None where there is none, or none can be had."""
        if self._listener is None:
            return None
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            _log.warning("cannot accept connections for now: %s", error.strerror or error)
            self._pause_accepting(_ACCEPT_PAUSE_S, self._accept_again)
            return None
        client.setblocking(False)
        return client

    def _pause_accepting(self, pause_s: float, then: Callable[[], None]) -> None:
        """Or the listener, which is ready all the time, would keep the loop busy."""
        if self._listener is not None and self._accept_pause is None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._accept_pause = loop.call_later(pause_s, then)

    def _accept_again(self) -> None:
        if self._accept_pause is not None:
            self._accept_pause.cancel()
            self._accept_pause = None
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _turn_away(self) -> None:
        """All that wait by now: nobody made room for them."""
        error = TooManyConnections("the server has as many connections as it takes")
        self._accept_again()
        while (client := self._next_client()) is not None:
            if self._tls_context is not None:
                client.close()
            else:
                self._turned_away.add(client, lambda: self._app.refusal(error))

    def _admitted(self, client: socket.socket, admission: asyncio.Task[None]) -> None:
        if admission.cancelled():  # Perhaps before it began.
            client.close()
        del self._admissions[admission]
        self._left()

    async def _admit(self, client: socket.socket, connection: HttpConnection) -> None:
        tls = self._tls_context
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                client,
                ssl=tls,
                ssl_handshake_timeout=self._header_read_timeout_s if tls else None,
                ssl_shutdown_timeout=self._write_timeout_ms / 1000 if tls else None,
            )
        except OSError as error:
            client.close()
            _log.debug("a connection ended before it was made: %r", error)
            return
        if not connection.is_lost:
            self._connections.add(connection)
            if self._listener is None:
                connection.finish()

    def _lost(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        self._left()

    def _left(self) -> None:
        if not self.connections:
            self._emptied.set()
        if self._accept_pause is not None and self.connections < self._max_connections:
            self._accept_again()

    async def _sweep(self) -> None:
        """End the connections whose clients are late, and keep the time that responses tell."""
        loop = asyncio.get_running_loop()
        while True:
            self._date = f"date: {formatdate(usegmt=True)}\r\n"
            now_s = loop.time()
            for connection in [each for each in self._connections if each.deadline_s < now_s]:
                connection.expire()
            await asyncio.sleep(_SWEEP_INTERVAL_S)

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
        if self._listener is not None:
            close_door(self._listener)
            await asyncio.sleep(_LEAVE_DELAY_S)
        return await self.stop(timeout_s)

    async def stop(self, timeout_s: float) -> bool:
        """Refuse new connections at once, finish what is in flight, close.

        Args:
            timeout_s: How long to wait before what is still in flight is cancelled.

        Returns:
            Whether everything finished in time.
        """
        if self._sweeping is None:
            return True
        self._close_listener()
        for admission, connection in self._admissions.items():
            if self._tls_context is not None and not connection.is_made:
                admission.cancel()  # A handshake may take its time.
        for connection in tuple(self._connections):
            connection.finish()
        finished = await self._until_empty(timeout_s)
        if not finished:
            for connection in tuple(self._connections):
                connection.abort()
            if not await self._until_empty(_CANCEL_GRACE_S):
                _log.warning("connections were still open %g s after the server was stopped", timeout_s)
        self._turned_away.close()
        self._sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeping
        return finished

    def _close_listener(self) -> None:
        if self._accept_pause is not None:
            self._accept_pause.cancel()
            self._accept_pause = None
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _until_empty(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.connections:
                    self._emptied.clear()
                    await self._emptied.wait()
        return not self.connections


async def _resolve(host: str) -> str:
    """The numeric address of a host."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerError(f"cannot resolve {host}: {error.strerror or error}") from None
    # IPv4 first, as `localhost` means for most clients.
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
