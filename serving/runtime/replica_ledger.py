"""Every tier's replicas, as they announce themselves to the hub: where and how they are, what they hold.

A replica announces itself every second from the moment it begins to load. One that falls silent
without a goodbye is lost; once another one begins after it, that is a restart. Counted so, neither
a replica that an update replaces nor one that was only slow is taken for a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.channel.endpoint import Endpoint
from serving.config import ModelConfig
from serving.runtime.tier_plan import deployment_name

ReplicaState = Literal["loading", "serving", "degraded", "refused", "failed"]
STATES: tuple[ReplicaState, ...] = get_args(ReplicaState)

#: A replica announces itself every second; one that is silent for this long is gone.
STALE_AFTER_S = 5.0
#: Lost replicas, per tier, that another one may still replace.
MAX_LOST = 1024


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a replica says of itself every second."""

    #: `MODEL:TIER`, the name of its deployment.
    tier: str
    #: Unique to one life of one replica.
    replica: str
    state: ReplicaState
    #: In use, by kind; empty until something is known.
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Where it takes batches; None while it loads, or if it does not serve.
    endpoint: Endpoint | None = None
    #: It stops, and is not to be missed.
    is_goodbye: bool = False


@dataclass(slots=True)
class _Life:
    began_s: float
    last_seen_s: float
    said: Announcement


@dataclass(slots=True)
class _Tier:
    """One tier's replicas."""

    model: str
    name: str
    configured: int
    restarts: int = 0
    lives: dict[str, _Life] = field(default_factory=dict)
    #: Fell silent, and nothing has begun in their stead: name -> when they were last heard.
    lost: dict[str, float] = field(default_factory=dict)
    #: When replicas began that have not been taken for a lost one's successor.
    begun_s: list[float] = field(default_factory=list)


class ReplicaLedger(Collector):
    """Keeps every tier's replicas, and shows them to Prometheus."""

    def __init__(self, models: Iterable[ModelConfig], clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._tiers = {
            deployment_name(model.name, name): _Tier(model.name, name, tier.replicas)
            for model in models
            for name, tier in model.tiers.items()
        }
        self.registry.register(self)

    def take(self, said: Announcement) -> None:
        """Hear a replica. One of a tier that the configuration does not have is not heard."""
        tier = self._tiers.get(said.tier)
        if tier is None:
            return
        now_s = self._clock()
        known = tier.lives.get(said.replica)
        if said.is_goodbye:
            tier.lives.pop(said.replica, None)
            return
        returned = tier.lost.pop(said.replica, None)
        if known is None:
            if returned is None and said.state == "loading":
                tier.begun_s.append(now_s)
            tier.lives[said.replica] = _Life(now_s, now_s, said)
        else:
            known.last_seen_s, known.said = now_s, said
        self._look(tier)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where replicas take batches, of those that were heard lately."""
        for tier in self._tiers.values():
            self._look(tier)
        return tuple(
            life.said.endpoint
            for tier in self._tiers.values()
            for life in tier.lives.values()
            if life.said.endpoint is not None
        )

    def _look(self, tier: _Tier) -> None:
        """Find who fell silent, and who began in their stead."""
        oldest_s = self._clock() - STALE_AFTER_S
        for name, life in tuple(tier.lives.items()):
            if life.last_seen_s < oldest_s:
                del tier.lives[name]
                tier.lost[name] = life.last_seen_s
        for name, last_seen_s in sorted(tier.lost.items(), key=lambda entry: entry[1]):
            successor_s = next((begun_s for begun_s in tier.begun_s if begun_s > last_seen_s), None)
            if successor_s is not None:
                tier.begun_s.remove(successor_s)
                del tier.lost[name]
                tier.restarts += 1
        del tier.begun_s[:-MAX_LOST]
        for name in tuple(tier.lost)[:-MAX_LOST]:
            del tier.lost[name]

    def collect(self) -> Iterator[Metric]:
        """Restarts so far, and the gauges of the replicas that were heard lately."""
        restarts = CounterMetricFamily(
            "halftone_replica_restarts",
            "Replicas that began in place of one that ended without a goodbye.",
            labels=("model", "tier"),
        )
        replicas = GaugeMetricFamily(
            "halftone_replicas",
            "Replicas by state: loading, serving, degraded (serves less than the tier's name says, which "
            "the configuration accepts), refused (the device cannot honour the tier) or failed.",
            labels=("model", "tier", "state"),
        )
        configured = GaugeMetricFamily(
            "halftone_replicas_configured",
            "Replicas that the configuration asks for.",
            labels=("model", "tier"),
        )
        memory = GaugeMetricFamily(
            "halftone_device_memory_bytes",
            "Memory of the tier's replicas together: rss on a CPU; allocated, reserved, free and total "
            "on a card.",
            labels=("model", "tier", "kind"),
        )
        for tier in self._tiers.values():
            self._look(tier)
            restarts.add_metric((tier.model, tier.name), tier.restarts)
            said = [life.said for life in tier.lives.values()]
            configured.add_metric((tier.model, tier.name), tier.configured)
            for state in STATES:
                replicas.add_metric((tier.model, tier.name, state), sum(one.state == state for one in said))
            kinds = sorted({kind for one in said for kind in one.memory_bytes})
            for kind in kinds:
                memory.add_metric(
                    (tier.model, tier.name, kind), sum(one.memory_bytes.get(kind, 0) for one in said)
                )
        yield from (restarts, replicas, configured, memory)
