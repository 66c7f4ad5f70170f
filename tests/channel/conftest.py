"""Both ends of channels, over real sockets in one event loop."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from channel_ends import Fallback, Replica, new_client, until

from serving.channel.client import ChannelTierClient


@pytest.fixture
def fallback() -> Fallback:
    """Counts what it gets."""
    return Fallback()


@pytest.fixture
def client_of(fallback: Fallback) -> Callable[..., Awaitable[ChannelTierClient]]:
    """A client that is connected to some replicas."""

    async def connected(*replicas: Replica, timeout_s: float = 5.0) -> ChannelTierClient:
        client = new_client(fallback, timeout_s=timeout_s)
        client.update([await replica.listen() for replica in replicas])
        await until(lambda: client.connected == len(replicas))
        return client

    return connected
