"""A gateway's connection to one replica: batches out, replies back, watched by pings."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable

from serving.channel.endpoint import Endpoint
from serving.channel.frames import Frame, encode_cancellation, encode_frame
from serving.channel.handshake import GREETING_BYTES, PROOF_BYTES, answer, check_acceptance, new_nonce
from serving.channel.server import GOODBYE_ID, PING_ID
from serving.channel.stream import FrameStream
from serving.gateway.tier_client import BatchResult
from serving.tensors import Tensors

logger = logging.getLogger("halftone.channel")

PING_INTERVAL_S = 1.0
#: A replica answers pings beside its device thread. One that has been silent for this long is
#: stopped or hangs, and its batches are sent elsewhere.
SILENCE_LIMIT_S = 8.0
_FIRST_BATCH_ID = 2


#: What a batch whose time has run out is still given: 0 would stand for no limit.
_NO_TIME_S = 1e-6


class ConnectionLost(Exception):
    """The replica is gone, or silent. The batch may or may not have been computed."""


class ReplicaConnection(FrameStream):
    """An open connection to a replica."""

    def __init__(self, key: bytes, endpoint: Endpoint, on_lost: Callable[[ReplicaConnection], None]) -> None:
        super().__init__(GREETING_BYTES)
        self.endpoint = endpoint
        #: Rows sent and not yet back.
        self.outstanding_rows = 0
        #: When it was taken last, in batches.
        self.taken = 0
        #: Whether the replica takes batches: it has not said goodbye.
        self.takes_batches = False
        self.ready = asyncio.get_running_loop().create_future()
        self._key = key
        self._on_lost = on_lost
        self._nonce = new_nonce()
        self._greeted: bytes | None = None
        self._ids = itertools.count(_FIRST_BATCH_ID)
        self._replies: dict[int, asyncio.Future[Frame]] = {}
        self._last_heard_s = 0.0
        self._pinger: asyncio.TimerHandle | None = None

    async def run(
        self, batch: Tensors, rows: int, *, is_background: bool = False, deadline_s: float = math.inf
    ) -> BatchResult:
        """Compute a batch; one in the background only if the replica has nothing else to do.

        Cancelled, or still waiting there at `deadline_s` on the loop's clock, it costs no compute.

        Raises:
            ConnectionLost: the connection ended before the reply.
            RequestError: what the replica answered.
        """
        if not self.is_open:
            raise ConnectionLost(self.endpoint.replica)
        loop = asyncio.get_running_loop()
        frame_id = next(self._ids)
        timeout_s = _remaining_s(deadline_s, loop.time())
        pieces = encode_frame(frame_id, batch, is_background=is_background, timeout_s=timeout_s)
        reply = self._replies[frame_id] = loop.create_future()
        self.outstanding_rows += rows
        try:
            self.write(pieces)
            frame = await reply
        except asyncio.CancelledError:
            self.write(encode_cancellation(frame_id))
            raise
        finally:
            self.outstanding_rows -= rows
            self._replies.pop(frame_id, None)
        frame.raise_error()
        return BatchResult(frame.tensors, frame.head.compute_s)

    def greet(self) -> None:
        """The replica speaks first."""

    def shake_hands(self, message: bytes) -> int:
        """The replica's greeting, then its proof."""
        if self._greeted is None:
            self._greeted = message
            self.write([answer(self._key, message, self._nonce)])
            return PROOF_BYTES
        check_acceptance(self._key, self._greeted, self._nonce, message)
        return 0

    def opened(self) -> None:
        """Batches may be sent now."""
        self.takes_batches = True
        self._last_heard_s = asyncio.get_running_loop().time()
        self._ping()
        if not self.ready.done():
            self.ready.set_result(None)

    def received(self, frame: Frame) -> None:
        """A reply, the answer to a ping, or a goodbye."""
        self._last_heard_s = asyncio.get_running_loop().time()
        if frame.head.id == GOODBYE_ID:
            self.takes_batches = False
        reply = self._replies.get(frame.head.id)
        if reply is not None and not reply.done():
            reply.set_result(frame)

    def lost(self, error: Exception | None) -> None:
        """The connection is gone: whoever waits for a reply is told."""
        self.takes_batches = False
        if self._pinger is not None:
            self._pinger.cancel()
        if not self.ready.done():
            self.ready.set_exception(ConnectionLost(f"{self.endpoint.replica}: {error or 'closed'}"))
            self.ready.exception()  # Taken note of here: nobody may be waiting.
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ConnectionLost(self.endpoint.replica))
        self._on_lost(self)

    def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        silence_s = loop.time() - self._last_heard_s
        if silence_s > SILENCE_LIMIT_S:
            logger.warning("replica %s has been silent for %.0f s", self.endpoint.replica, silence_s)
            self.close()
            return
        self.write(encode_frame(PING_ID, {}))
        self._pinger = loop.call_later(PING_INTERVAL_S, self._ping)


def _remaining_s(deadline_s: float, now_s: float) -> float:
    """As frames say it: 0 for no limit."""
    return 0.0 if math.isinf(deadline_s) else max(_NO_TIME_S, deadline_s - now_s)
