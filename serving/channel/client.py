"""`TierClient` over direct connections to a tier's replicas, with a Serve handle behind it.

Which replicas there are, Serve decides; where they listen, they announce. A batch goes to the
connected replica with the fewest rows outstanding; one whose replica was lost is sent once more,
to another replica. With no replica connected the Serve handle takes it, and waits for one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from serving.channel.connection import ConnectionLost, ReplicaConnection
from serving.channel.endpoint import Endpoint, connected_ipc_socket, this_host
from serving.channel.handshake import HANDSHAKE_TIMEOUT_S
from serving.errors import DeviceLost, NotReady, TierLost
from serving.gateway.tier_client import ATTEMPTS, BatchResult, TierReport, lost_with_replicas
from serving.tensors import Tensors, row_count

logger = logging.getLogger("halftone.channel")

#: How a batch reaches its replica: over a connection of the channel, or by a Serve call.
BatchWay = Literal["direct", "serve"]


class FallbackClient(Protocol):
    """How a tier is reached where no replica is connected."""

    async def run(
        self, batch: Tensors, *, deadline_s: float = math.inf, attempts: int = ATTEMPTS
    ) -> BatchResult:
        """Compute a batch, tried `attempts` times at most."""

    async def report(self, *, with_example: bool) -> TierReport:
        """What the tier is."""


class ChannelTierClient:
    """Reaches one tier's replicas directly. All methods run on one event loop."""

    def __init__(
        self,
        name: str,
        fallback: FallbackClient,
        key: bytes,
        timeout_s: float,
        count: Callable[[BatchWay], None] = lambda _: None,
    ) -> None:
        """Make the client.

        Args:
            name: for messages.
            fallback: takes batches while no replica is connected.
            key: what the replicas of this run know.
            timeout_s: for one batch, all attempts together.
            count: told of each attempt, by which way it goes.
        """
        self._name = name
        self._fallback = fallback
        self._key = key
        self._timeout_s = timeout_s
        self._count = count
        self._host = this_host()
        self._connections: dict[str, ReplicaConnection] = {}
        #: How often a replica was taken.
        self._taken = 0
        self._turns = itertools.count()
        self._connecting: dict[str, asyncio.Task[None]] = {}
        #: Announced, and not reached: said once.
        self._unreachable: set[str] = set()

    @property
    def connected(self) -> int:
        """Replicas that take batches now."""
        return sum(connection.takes_batches for connection in self._connections.values())

    def update(self, endpoints: Iterable[Endpoint]) -> None:
        """Connect to replicas that were announced. One that is gone is noticed by its connection."""
        announced = tuple(endpoints)
        self._unreachable &= {endpoint.replica for endpoint in announced}
        for endpoint in announced:
            if endpoint.replica in self._connections or endpoint.replica in self._connecting:
                continue
            if endpoint.address(self._host) is not None:
                task = asyncio.get_running_loop().create_task(self._connect(endpoint))
                self._connecting[endpoint.replica] = task

    async def _connect(self, endpoint: Endpoint) -> None:
        connection = ReplicaConnection(self._key, endpoint, self._lost)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await _open_stream(connection, endpoint.address(self._host))
                await connection.ready
            if connection.is_open:
                self._connections[endpoint.replica] = connection
                self._unreachable.discard(endpoint.replica)
        except (OSError, TimeoutError, ConnectionLost) as error:
            # It may have ended since it was announced; the next announcement tries again.
            connection.close()
            if endpoint.replica not in self._unreachable:
                logger.warning("replica %s cannot be reached directly: %r", endpoint.replica, error)
            self._unreachable.add(endpoint.replica)
        finally:
            del self._connecting[endpoint.replica]

    def _lost(self, connection: ReplicaConnection) -> None:
        if self._connections.get(connection.endpoint.replica) is connection:
            del self._connections[connection.endpoint.replica]

    async def run(
        self, batch: Tensors, *, deadline_s: float = math.inf, is_suspect: bool = False
    ) -> BatchResult:
        """Compute a batch; see `TierClient.run`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._attempt(batch, deadline_s, is_suspect=is_suspect)
        except TimeoutError as error:
            raise TierLost(f"tier {self._name} did not answer within {self._timeout_s:g} s") from error

    async def _attempt(self, batch: Tensors, deadline_s: float, *, is_suspect: bool) -> BatchResult:
        lost: Exception | None = None
        attempts = 1 if is_suspect else ATTEMPTS
        rows = row_count(batch)
        for attempt in range(attempts):
            connection = self._least_loaded()
            if connection is None:
                if is_suspect:
                    raise TierLost(f"no replica of tier {self._name} is connected")
                self._count("serve")
                return await self._by_serve(batch, deadline_s, attempts - attempt, attempt)
            self._count("direct")
            try:
                return await connection.run(batch, rows, deadline_s=deadline_s)
            except ConnectionLost as error:
                lost = error
            except DeviceLost as error:
                # Its process ends in a moment; until then it takes nothing more from here.
                connection.takes_batches = False
                lost = error
            logger.warning("tier %s: a batch lost its replica: %r", self._name, lost)
        raise lost_with_replicas(self._name, attempts, attempts) from lost

    async def _by_serve(
        self, batch: Tensors, deadline_s: float, attempts: int, replicas_lost: int
    ) -> BatchResult:
        try:
            return await self._fallback.run(batch, deadline_s=deadline_s, attempts=attempts)
        except TierLost as error:
            # A Serve call may find only that the replica is gone already: that proves nothing
            # against the batch, other than a connection that broke while it was there.
            error.calls_lost += replicas_lost
            error.replicas_lost = replicas_lost
            raise

    async def run_background(self, batch: Tensors) -> BatchResult:
        """Compute a batch if a connected replica is idle; see `TierClient.run_background`."""
        idle = [one for one in self._connections.values() if one.takes_batches and not one.outstanding_rows]
        if not idle:
            raise NotReady("no connected replica is idle")
        # In turn: what one replica computed, the next batch shows from another.
        connection = idle[next(self._turns) % len(idle)]
        try:
            async with asyncio.timeout(self._timeout_s):
                return await connection.run(batch, row_count(batch), is_background=True)
        except (ConnectionLost, TimeoutError) as error:
            raise NotReady("the replica was lost") from error

    def _least_loaded(self) -> ReplicaConnection | None:
        """The replica with the fewest rows outstanding; of several, the one that was taken longest ago."""
        able = [connection for connection in self._connections.values() if connection.takes_batches]
        chosen = min(able, key=lambda one: (one.outstanding_rows, one.taken), default=None)
        if chosen is not None:
            self._taken += 1
            chosen.taken = self._taken
        return chosen

    async def report(self, *, with_example: bool) -> TierReport:
        """What the tier is. Waits until a replica has started."""
        return await self._fallback.report(with_example=with_example)

    def close(self) -> None:
        """Close every connection."""
        for task in self._connecting.values():
            task.cancel()
        for connection in tuple(self._connections.values()):
            connection.close()


async def _open_stream(connection: ReplicaConnection, address: str | tuple[str, int] | None) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        await loop.create_unix_connection(lambda: connection, sock=connected_ipc_socket(address))
    elif address is not None:
        await loop.create_connection(lambda: connection, *address)
