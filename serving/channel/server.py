"""The replica's end of the channel: listens, and computes what gateways send."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from serving.channel.endpoint import Endpoint, listening_ipc_socket, new_ipc_name, this_host
from serving.channel.frames import Frame, encode_error, encode_frame
from serving.channel.handshake import ANSWER_BYTES, acceptance, greeting, new_nonce
from serving.channel.spare_time import SpareTime
from serving.channel.stream import FrameStream
from serving.errors import InternalError, NotReady, RequestError
from serving.gateway.tier_client import BatchResult
from serving.tensors import Tensors

logger = logging.getLogger("halftone.channel")

#: Computes a batch, for which somebody waits that many seconds from now on.
Run = Callable[[Tensors, float], Awaitable[BatchResult | RequestError]]

#: Gateways that may be connected to one replica.
MAX_CONNECTIONS = 256
#: A frame of this id asks whether the replica lives; the same comes back.
PING_ID = 0
#: A frame of this id tells gateways to send no more batches: the replica is about to stop.
GOODBYE_ID = 1


class ChannelServer:
    """Listens for gateways. All methods run on one event loop."""

    def __init__(self, run: Run, key: bytes, *, max_inflight: int) -> None:
        """Make the server.

        Args:
            run: computes a batch.
            key: what the gateways of this run know.
            max_inflight: batches under way, of all gateways together; more are refused.
        """
        self._run = run
        self._key = key
        self._max_inflight = max_inflight
        self._connections: set[_GatewayStream] = set()
        self._servers: list[asyncio.Server] = []
        self._batches: set[asyncio.Task[None]] = set()
        self._spare_time = SpareTime(time.monotonic)
        self._is_closing = False

    async def start(self, tier: str, replica: str, tcp_host: str | None) -> Endpoint:
        """Listen, for gateways of this host and, with `tcp_host`, for those of others too."""
        loop = asyncio.get_running_loop()
        ipc_name = new_ipc_name()
        self._servers.append(await loop.create_unix_server(self._accept, sock=listening_ipc_socket(ipc_name)))
        tcp = None
        if tcp_host is not None:
            server = await loop.create_server(self._accept, tcp_host, 0)
            self._servers.append(server)
            tcp = (tcp_host, int(server.sockets[0].getsockname()[1]))
        return Endpoint(tier, replica, this_host(), ipc_name, tcp)

    async def close(self, timeout_s: float) -> None:
        """Say goodbye, finish the batches under way, and close."""
        self._is_closing = True
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.write(encode_frame(GOODBYE_ID, {}))
        if self._batches:
            await asyncio.wait(self._batches, timeout=timeout_s)
        for connection in tuple(self._connections):
            connection.finish()

    def _accept(self) -> _GatewayStream:
        return _GatewayStream(self, self._key)

    def joined(self, connection: _GatewayStream) -> bool:
        """Note a connection. Returns whether there was room for it."""
        if len(self._connections) >= MAX_CONNECTIONS or self._is_closing:
            return False
        self._connections.add(connection)
        return True

    def left(self, connection: _GatewayStream) -> None:
        """A connection is gone."""
        self._connections.discard(connection)

    def compute(self, connection: _GatewayStream, frame: Frame) -> asyncio.Task[None] | None:
        """Compute a batch and reply. Cancelled before it started, it costs no compute."""
        is_background = frame.head.is_background
        if is_background and not self._spare_time.allows_background():
            connection.write(encode_error(frame.head.id, NotReady("the replica has no time to spare")))
            return None
        if len(self._batches) >= self._max_inflight:
            connection.write(encode_error(frame.head.id, NotReady("the replica has too many batches")))
            return None
        task = asyncio.get_running_loop().create_task(self._answer(connection, frame))
        self._batches.add(task)
        self._spare_time.began(is_background)
        task.add_done_callback(lambda done: self._ended(done, is_background))
        return task

    def _ended(self, task: asyncio.Task[None], is_background: bool) -> None:
        self._batches.discard(task)
        self._spare_time.ended(is_background)

    async def _answer(self, connection: _GatewayStream, frame: Frame) -> None:
        connection.write(await self._reply(frame))

    async def _reply(self, frame: Frame) -> list[bytes | memoryview]:
        try:
            result = await self._run(frame.tensors, frame.head.timeout_s or math.inf)
            if isinstance(result, RequestError):
                return encode_error(frame.head.id, result)
            return encode_frame(frame.head.id, result.outputs, compute_s=result.compute_s)
        except RequestError as error:
            return encode_error(frame.head.id, error)
        except Exception:
            logger.exception("a batch could not be computed")
            return encode_error(frame.head.id, InternalError("the batch could not be computed"))


class _GatewayStream(FrameStream):
    """A replica's connection to one gateway."""

    def __init__(self, server: ChannelServer, key: bytes) -> None:
        super().__init__(ANSWER_BYTES)
        self._server = server
        self._key = key
        self._nonce = new_nonce()
        self._batches: dict[int, asyncio.Task[None]] = {}

    def greet(self) -> None:
        """The replica speaks first."""
        if not self._server.joined(self):
            self.close()
            return
        self.write([greeting(self._nonce)])

    def shake_hands(self, message: bytes) -> int:
        """The gateway's proof has come."""
        self.write([acceptance(self._key, self._nonce, message)])
        return 0

    def opened(self) -> None:
        """Nothing to do: gateways speak first from here on."""

    def received(self, frame: Frame) -> None:
        """A ping, a batch, or the end of the wait for one."""
        frame_id = frame.head.id
        if frame_id == PING_ID:
            self.write(encode_frame(PING_ID, {}))
        elif frame.head.is_cancellation:
            if waiting := self._batches.get(frame_id):
                waiting.cancel()
        elif task := self._server.compute(self, frame):
            self._batches[frame_id] = task
            task.add_done_callback(lambda _: self._batches.pop(frame_id, None))

    def lost(self, error: Exception | None) -> None:
        """The gateway is gone, and nobody waits for its batches."""
        del error
        self._server.left(self)
        for task in self._batches.values():
            task.cancel()

    def finish(self) -> None:
        """Close once what was written has been sent."""
        if self._transport is not None:
            self._transport.close()
