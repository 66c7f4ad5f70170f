"""A replica with a model of its own, and what stands for the Serve handle."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from serving.channel.client import ChannelTierClient
from serving.channel.endpoint import Endpoint
from serving.channel.server import ChannelServer
from serving.errors import RequestError
from serving.gateway.tier_client import BatchResult, TierReport
from serving.tensors import Tensors

KEY = b"the key of this run"


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  Conditions of foreign objects.
            await asyncio.sleep(0.002)


_opened: list[Any] = []


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario, and close every end that it opened."""

    async def closing() -> None:
        try:
            await scenario()
        finally:
            for end in _opened:
                end.close()
            _opened.clear()
            await asyncio.sleep(0.01)  # For the sockets to close.

    asyncio.run(closing())


def new_client(fallback: "Fallback", key: bytes = KEY, timeout_s: float = 5.0) -> ChannelTierClient:
    """A gateway's end, connected to nothing yet."""
    client = ChannelTierClient("m/fp32", fallback, key, timeout_s)
    _opened.append(client)
    return client


class Replica:
    """A replica whose model adds its number to every row, once its gate is open."""

    def __init__(self, number: int, max_inflight: int = 4) -> None:
        self.number = number
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = 0
        self.timeouts_s: list[float] = []
        self.finished = 0
        self.error: RequestError | Exception | None = None
        self.server = ChannelServer(self.run, KEY, max_inflight=max_inflight)
        self.endpoint: Endpoint | None = None
        _opened.append(self)

    async def run(self, batch: Tensors, timeout_s: float) -> BatchResult | RequestError:
        """Compute."""
        self.timeouts_s.append(timeout_s)
        self.started += 1
        await self.gate.wait()
        self.finished += 1
        if isinstance(self.error, RequestError):
            return self.error
        if self.error is not None:
            raise self.error
        return BatchResult({"y": batch["x"] + self.number}, 0.25)

    async def listen(self, tcp_host: str | None = None) -> Endpoint:
        """Start."""
        self.endpoint = await self.server.start("m:fp32", f"replica{self.number}", tcp_host)
        return self.endpoint

    def close(self) -> None:
        """At the end of a scenario."""
        self.gate.set()
        self.die()

    def die(self) -> None:
        """As a killed process: its sockets close, and nothing is said."""
        for server in self.server._servers:
            server.close()
        for connection in tuple(self.server._connections):
            connection.close()


class Fallback:
    """The Serve handle's part."""

    def __init__(self) -> None:
        self.attempts: list[int] = []
        self.deadlines_s: list[float] = []
        self.error: RequestError | None = None

    async def run(self, batch: Tensors, *, deadline_s: float = math.inf, attempts: int = 2) -> BatchResult:
        """Compute, or not."""
        self.attempts.append(attempts)
        self.deadlines_s.append(deadline_s)
        if self.error is not None:
            raise self.error
        return BatchResult({"y": batch["x"] - 1}, 0.0)

    async def report(self, *, with_example: bool) -> TierReport:
        """Not asked for here."""
        raise NotImplementedError


def batch(rows: int = 2) -> Tensors:
    """Zeros."""
    return {"x": np.zeros((rows, 3), np.float32)}
