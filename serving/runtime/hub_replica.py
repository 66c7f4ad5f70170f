"""The hub's replica: merges the gateways' metrics, tells them where replicas listen, and when to drain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from serving.channel.endpoint import Endpoint
from serving.config import Config
from serving.divergence.standing import Standing
from serving.gateway.precision_record import ModelFigures
from serving.observe.hub import Family, Hub, Snapshot, take_snapshot
from serving.runtime.precision_ledger import PrecisionLedger


@dataclass(frozen=True, slots=True)
class Beat:
    """What a gateway pushes every second."""

    process: str
    snapshot: Snapshot
    inflight_requests: int
    #: Whether it refuses new requests already.
    draining: bool
    #: Model -> what was compared since the last beat.
    figures: Mapping[str, ModelFigures]
    #: Model -> tier -> what this gateway was told last, for a hub that knows nothing yet.
    standings: Mapping[str, Mapping[str, Standing]]


@dataclass(frozen=True, slots=True)
class Orders:
    """What a gateway is told in return."""

    drain: bool
    #: Replicas that announced themselves lately.
    endpoints: tuple[Endpoint, ...]
    #: Model -> tier -> its state, and what it rests on.
    standings: Mapping[str, Mapping[str, Standing]]


#: A replica announces itself every second; one that is silent for this long is not told of.
ENDPOINT_STALE_AFTER_S = 5.0


class HubReplica:
    """One per application, on any node."""

    def __init__(self, config: Config) -> None:
        self._hub = Hub()
        self._precision = PrecisionLedger(config.models)
        self._gateways: dict[str, Beat] = {}
        self._endpoints: dict[str, tuple[Endpoint, float]] = {}
        self._draining = False

    async def announce(self, endpoint: Endpoint) -> None:
        """A replica listens there."""
        self._endpoints[endpoint.replica] = (endpoint, time.monotonic())

    async def push(self, beat: Beat) -> Orders:
        """Take a gateway's figures and tell it what to do."""
        self._hub.push(beat.process, beat.snapshot)
        self._gateways[beat.process] = beat
        self._precision.restore(beat.standings)
        self._precision.add(beat.figures)
        return Orders(self._draining, self._live_endpoints(), self._precision.standings())

    async def set_tier(self, model: str, tier: str, action: str, reason: str) -> None:
        """Trip or reset a tier by hand."""
        self._precision.set_by_hand(model, tier, action, reason)

    def _live_endpoints(self) -> tuple[Endpoint, ...]:
        oldest_s = time.monotonic() - ENDPOINT_STALE_AFTER_S
        self._endpoints = {name: one for name, one in self._endpoints.items() if one[1] >= oldest_s}
        return tuple(endpoint for endpoint, _ in self._endpoints.values())

    async def push_and_render(self, beat: Beat, openmetrics: bool) -> bytes:
        """Take a gateway's figures and return the page of all."""
        await self.push(beat)
        self._push_own()
        return self._hub.render(openmetrics)

    async def push_and_merge(self, beat: Beat) -> list[Family]:
        """Take a gateway's figures and return the families of all."""
        await self.push(beat)
        self._push_own()
        return self._hub.merged()

    def _push_own(self) -> None:
        self._hub.push("hub", take_snapshot(self._precision.registry))

    async def drain(self) -> int:
        """Tell gateways to drain. Returns how many have not finished yet."""
        self._draining = True
        return sum(
            1
            for process, beat in self._gateways.items()
            if self._hub.is_alive(process) and (beat.inflight_requests or not beat.draining)
        )
