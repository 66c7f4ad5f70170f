"""What becomes of clients that the server has no room for: a clear refusal, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from serving.protocol.http import Response
from serving.protocol.http_wire import encode_head

#: For a client that was turned away to send what it began to, and read the answer.
LINGER_S = 1.0
#: Of those clients at a time; others are disconnected without an answer.
MAX_LINGERING = 64
_MAX_DISCARDED_BYTES = 1 << 20


class TurnedAway:
    """Clients that are told that there is no room, and then let go."""

    def __init__(self) -> None:
        self._lingering: set[asyncio.Task[None]] = set()

    def add(self, client: socket.socket, refusal: Callable[[], Response]) -> None:
        """Tell one, unless too many are being told.

        Args:
            client: its connection, not blocking, which is closed in the end.
            refusal: makes what it is told.
        """
        if len(self._lingering) >= MAX_LINGERING:
            client.close()
            return
        response = refusal()
        answer = encode_head(response, "connection: close\r\n") + response.body
        task = asyncio.get_running_loop().create_task(_tell(client, answer))
        self._lingering.add(task)
        task.add_done_callback(lambda task: self._let_go(task, client))

    def close(self) -> None:
        """Let go of all."""
        for task in tuple(self._lingering):
            task.cancel()

    def _let_go(self, task: asyncio.Task[None], client: socket.socket) -> None:
        # Here, since a task that is cancelled before it begins closes nothing.
        client.close()
        self._lingering.discard(task)


async def _tell(client: socket.socket, answer: bytes) -> None:
    """Say why, and take in what the client still sends: closed at once, it might never read the answer."""
    loop = asyncio.get_running_loop()
    discarded_bytes = 0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(client, answer)
            client.shutdown(socket.SHUT_WR)
            while chunk := await loop.sock_recv(client, 65_536):
                discarded_bytes += len(chunk)
                if discarded_bytes > _MAX_DISCARDED_BYTES:
                    return
