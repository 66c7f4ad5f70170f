"""The hub's replica: merges the gateways' metrics, tells them where replicas listen, and when to drain."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from serving.channel.endpoint import Endpoint
from serving.config import Config
from serving.divergence.standing import Standing
from serving.gateway.figures import Parcel
from serving.observe.hub import SETTLE_S, Forgotten, Hub
from serving.observe.logs import configure_logging
from serving.observe.snapshot import Family, Snapshot, take_snapshot
from serving.runtime.precision_ledger import PrecisionLedger
from serving.runtime.replica_ledger import Announcement, ReplicaLedger


@dataclass(frozen=True, slots=True)
class Beat:
    """What a gateway pushes every second."""

    process: str
    #: The hub whose past this gateway keeps; None if it never met one.
    hub: str | None
    snapshot: Snapshot
    inflight_requests: int
    #: Whether it refuses new requests already.
    draining: bool
    #: Whether it ends, and these figures are its last.
    is_last: bool
    #: What was compared, until the hub has it.
    parcels: tuple[Parcel, ...]
    #: Model -> tier -> what this gateway was told last, for a hub that knows nothing yet.
    standings: Mapping[str, Mapping[str, Standing]]


@dataclass(frozen=True, slots=True)
class Orders:
    """What a gateway is told in return."""

    #: The hub's name and the version of its past, which gateways keep for the next hub.
    hub: str
    past_version: int
    #: The gateway was silent for so long that its totals are no longer kept apart: it must end.
    is_forgotten: bool
    #: Whether the last figures of a gateway that ends are with another one.
    is_kept: bool
    drain: bool
    #: Another application has taken over: hand every connection to it.
    retire: bool
    #: Replicas that announced themselves lately.
    endpoints: tuple[Endpoint, ...]
    #: Model -> tier -> its state, and what it rests on.
    standings: Mapping[str, Mapping[str, Standing]]


class HubReplica:
    """One per application, on any node."""

    def __init__(self, config: Config, standings: Mapping[str, Mapping[str, Standing]]) -> None:
        """`standings`: what the hub of the application before this one knew."""
        configure_logging(config.server.log)
        self._hub = Hub(f"hub-{secrets.token_hex(8)}", settle_s=SETTLE_S)
        self._precision = PrecisionLedger(config.models)
        self._precision.restore("predecessor", standings)
        self._gateways: dict[str, Beat] = {}
        self._replicas = ReplicaLedger(config.models)
        self._draining = False
        self._retiring = False

    async def announce(self, said: Announcement) -> None:
        """A replica says where and how it is."""
        self._replicas.take(said)

    async def push(self, beat: Beat) -> Orders:
        """Take a gateway's figures and tell it what to do."""
        is_forgotten = is_kept = False
        try:
            self._hub.push(beat.process, beat.snapshot, is_last=beat.is_last)
            is_kept = beat.is_last and self._hub.is_kept(beat.process)
        except Forgotten:
            is_forgotten = True
        if beat.hub not in {None, self._hub.name}:
            self._hub.expect(_past_of(beat.process))
        self._push_own()
        self._gateways[beat.process] = beat
        self._precision.restore(beat.process, beat.standings)
        self._precision.add(beat.process, beat.parcels)
        return Orders(
            self._hub.name,
            self._hub.version,
            is_forgotten,
            is_kept,
            self._draining,
            self._retiring,
            self._replicas.endpoints(),
            self._precision.standings(),
        )

    async def past(self, process: str) -> bytes:
        """What the next hub must know, for a gateway to keep."""
        return self._hub.past(process)

    async def restore(self, process: str, past: bytes) -> None:
        """Take over what a gateway keeps of the hub before this one."""
        self._hub.restore(past)
        self._hub.expect(_past_of(process), no_more=True)

    async def set_tier(
        self, model: str, tier: str, action: str, reason: str
    ) -> dict[str, dict[str, Standing]]:
        """Trip or reset a tier by hand. Returns what there is to tell of all tiers now."""
        self._precision.set_by_hand(model, tier, action, reason)
        return self._precision.standings()

    async def push_and_render(self, beat: Beat, openmetrics: bool) -> bytes | None:
        """Take a gateway's figures and return the page of all; None before this hub knows them."""
        await self.push(beat)
        return self._hub.render(openmetrics) if self._hub.is_settled else None

    async def push_and_merge(self, beat: Beat) -> list[Family] | None:
        """Take a gateway's figures and return the families of all; None before this hub knows them."""
        await self.push(beat)
        return self._hub.merged() if self._hub.is_settled else None

    async def push_and_list(self, beat: Beat) -> list[str]:
        """Take a gateway's figures and return the processes that have a page of their own."""
        await self.push(beat)
        return self._hub.processes()

    async def push_and_render_process(self, beat: Beat, process: str, openmetrics: bool) -> bytes | None:
        """Take a gateway's figures and return one process's page; None where it does not live."""
        await self.push(beat)
        return self._hub.render_process(process, openmetrics)

    def _push_own(self) -> None:
        own = (self._precision.registry, self._replicas.registry)
        self._hub.push_own(tuple(family for registry in own for family in take_snapshot(registry)))

    async def standings(self) -> Mapping[str, Mapping[str, Standing]]:
        """What is known of every tier."""
        return self._precision.standings()

    async def drain(self) -> int:
        """Tell gateways to drain. Returns how many have not finished yet."""
        self._draining = True
        return self._unfinished()

    async def retire(self) -> int:
        """Tell gateways that others have taken over. Returns how many have not finished yet."""
        self._retiring = True
        return self._unfinished()

    def _unfinished(self) -> int:
        return sum(
            1
            for process, beat in self._gateways.items()
            if self._hub.is_alive(process) and (beat.inflight_requests or not beat.draining)
        )


def _past_of(process: str) -> str:
    """What a hub waits for beside the processes themselves."""
    return f"past of {process}"
