"""What becomes of connections that the server has no room for: a clear refusal, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable
from http import HTTPStatus

from serving.protocol.http import Response
from serving.protocol.own_sockets import connections

#: Between looks at the queue of connections that the server has not accepted.
LOOK_INTERVAL_S = 0.05
#: For how many looks in a row the queue must hold some. A server that has room empties it in microseconds.
PATIENCE_LOOKS = 5
#: For a client that was turned away to send what it began to, and read the answer.
LINGER_S = 1.0
#: Of those clients at a time; others are disconnected without an answer.
MAX_LINGERING = 64
_MAX_DISCARDED_BYTES = 1 << 20


class Doorman:
    """Turns connections away while as many are open as the server takes.

    The server leaves what exceeds its limit in the kernel's queue, where a client waits without a
    word until another one leaves.
    """

    def __init__(self, listener: int, limit: int, refusal: Callable[[], Response] | None) -> None:
        """Look after a listener.

        Args:
            listener: a descriptor of the server's listening socket; the doorman keeps a copy.
            limit: how many connections the server keeps open.
            refusal: makes what a refused client is told; None where it could not be told, over TLS:
                then it is disconnected.
        """
        # Not socket.dup(): that sets the handle to block, and with it the server's own.
        self._listener = socket.socket(fileno=os.dup(listener))
        self._listener.setblocking(False)
        self._port: int = self._listener.getsockname()[1]
        self._limit = limit
        self._refusal = refusal
        self._queue = select.poll()
        self._queue.register(self._listener, select.POLLIN)
        self._lingering: set[asyncio.Task[None]] = set()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Let go of the listener: while a handle is open, the port is."""
        self._watching.cancel()
        self._listener.close()
        for task in tuple(self._lingering):
            task.cancel()

    async def _watch(self) -> None:
        waited_looks = 0
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            waited_looks = waited_looks + 1 if self._queue.poll(0) else 0
            # A process that is short of CPU may leave its queue too, and counting is the dearer half.
            if waited_looks >= PATIENCE_LOOKS:
                if connections(self._port) >= self._limit:
                    self._turn_away()
                waited_looks = 0

    def _turn_away(self) -> None:
        """All that wait by now."""
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                connection, _ = self._listener.accept()
                response = self._refusal() if self._refusal else None
                if response is None or len(self._lingering) >= MAX_LINGERING:
                    connection.close()
                    continue
                task = asyncio.get_running_loop().create_task(_answer(connection, wire_bytes(response)))
                self._lingering.add(task)
                task.add_done_callback(self._lingering.discard)


async def _answer(connection: socket.socket, answer: bytes) -> None:
    """Say why, and take in what the client still sends: closed at once, it might never read the answer."""
    loop = asyncio.get_running_loop()
    discarded_bytes = 0
    with connection, contextlib.suppress(OSError, TimeoutError):
        connection.setblocking(False)
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(connection, answer)
            connection.shutdown(socket.SHUT_WR)
            while chunk := await loop.sock_recv(connection, 65_536):
                discarded_bytes += len(chunk)
                if discarded_bytes > _MAX_DISCARDED_BYTES:
                    return


def wire_bytes(response: Response) -> bytes:
    """A response as HTTP/1.1 sends it on a connection that is closed after it."""
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in response.headers]
    lines += [f"content-length: {len(response.body)}", "connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + response.body
