"""A server that answers at once, but for one known stall: what the generator's self-test measures.

    python -m loadtests.open_loop.stalling_server STALL_AFTER_S STALL_S

Prints its port. The stall begins STALL_AFTER_S after the first request and blocks the whole process,
as a garbage collection or a lock would.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

_REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Stall:
    """Blocks once."""

    def __init__(self, after_s: float, for_s: float) -> None:
        self._after_s, self._for_s = after_s, for_s
        self._is_set = False

    def begin(self) -> None:
        """The first request is here."""
        if not self._is_set:
            self._is_set = True
            asyncio.get_running_loop().call_later(self._after_s, time.sleep, self._for_s)


class Answers(asyncio.Protocol):
    """Replies to whatever arrives: requests are small, and come in one piece."""

    def __init__(self, stall: Stall) -> None:
        self._stall = stall
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Reply."""
        self._stall.begin()
        if self._transport is not None:
            self._transport.write(_REPLY)


async def main() -> None:
    """Serve until killed."""
    stall = Stall(float(sys.argv[1]), float(sys.argv[2]))
    server = await asyncio.get_running_loop().create_server(
        lambda: Answers(stall), "127.0.0.1", 0, backlog=512
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
