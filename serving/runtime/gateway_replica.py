"""A gateway's replica: the embedded HTTP server, its service, and the beat to the hub."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

from prometheus_client import CollectorRegistry
from ray.serve.handle import DeploymentHandle

from serving import __version__
from serving.channel.client import BatchWay, ChannelTierClient
from serving.channel.endpoint import Endpoint
from serving.config import Config, ServerConfig
from serving.divergence.standing import Standing
from serving.gateway.auth import Authenticator, load_tokens
from serving.gateway.model import Lane, ServedModel
from serving.gateway.service import Service
from serving.gateway.watch import watch_lane
from serving.observe.hub import Family, take_snapshot
from serving.observe.metrics import GatewayMetrics
from serving.protocol.rsgi import RsgiApp
from serving.protocol.server import EmbeddedServer
from serving.runtime.hub_replica import Beat, Orders
from serving.runtime.serve_tier_client import ServeTierClient
from serving.runtime.tier_plan import deployment_name

logger = logging.getLogger("halftone.gateway")

BEAT_INTERVAL_S = 0.5
#: For the reports of tiers that run already, before a new gateway listens.
KNOWN_TIMEOUT_S = 2.0
#: For the hub to answer; a page that takes longer is refused.
HUB_TIMEOUT_S = 2.0


class RemoteHub:
    """The hub, which is told this gateway's own figures with every question."""

    def __init__(
        self, hub: DeploymentHandle, registry: CollectorRegistry, service: Callable[[], Service]
    ) -> None:
        """`service`: the gateway's own, asked at each beat for what it is doing at that moment."""
        self._push = hub.options(method_name="push")
        self._render = hub.options(method_name="push_and_render")
        self._merge = hub.options(method_name="push_and_merge")
        self._set_tier = hub.options(method_name="set_tier")
        self._registry = registry
        # Unique to this life of this process, wherever it runs.
        self._process = f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}"
        self._service = service

    def _beat(self) -> Beat:
        service = self._service()
        measured = {model.name: model.precision for model in service.models if model.precision is not None}
        return Beat(
            self._process,
            take_snapshot(self._registry),
            service.inflight_requests,
            service.is_draining,
            {name: precision.take_figures() for name, precision in measured.items()},
            {name: precision.standings for name, precision in measured.items()},
        )

    async def page(self, openmetrics: bool) -> bytes:
        """The rendered page."""
        async with asyncio.timeout(HUB_TIMEOUT_S):
            page: bytes = await self._render.remote(self._beat(), openmetrics)
            return page

    async def families(self) -> list[Family]:
        """The merged families."""
        async with asyncio.timeout(HUB_TIMEOUT_S):
            families: list[Family] = await self._merge.remote(self._beat())
            return families

    async def set_tier(self, model: str, tier: str, action: str, reason: str) -> None:
        """Trip or reset a tier by hand."""
        async with asyncio.timeout(HUB_TIMEOUT_S):
            await self._set_tier.remote(model, tier, action, reason)

    async def push(self) -> Orders:
        """Push the figures. Returns what to do."""
        async with asyncio.timeout(HUB_TIMEOUT_S):
            orders: Orders = await self._push.remote(self._beat())
            return orders


class GatewayReplica:
    """Serves HTTP on the configured port; several share it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it; type checkers want None.
        self,
        config: Config,
        tiers: dict[str, dict[str, DeploymentHandle]],
        hub: DeploymentHandle,
        channel_key: bytes,
    ) -> None:
        """`tiers`: model -> tier -> handle."""
        server = config.server
        metrics = GatewayMetrics(CollectorRegistry())
        _set_build_info(metrics)
        self._clients = {
            deployment_name(model, tier): _tier_client(handle, (model, tier), server, channel_key, metrics)
            for model, handles in tiers.items()
            for tier, handle in handles.items()
        }
        models = {
            model.name: ServedModel(
                model,
                {tier: self._clients[deployment_name(model.name, tier)] for tier in tiers[model.name]},
                metrics,
            )
            for model in config.models
        }
        tokens = load_tokens(server.tokens_file) if server.tokens_file else None
        self._hub = RemoteHub(hub, metrics.registry, lambda: self._service)
        self._service = Service(server, models, metrics, Authenticator(tokens), self._hub)
        app = RsgiApp(
            self._service.handle,
            refuse=self._service.refuse,
            max_body_bytes=server.max_body_bytes,
            body_timeout_s=server.body_timeout_s,
        )
        self._drain_timeout_s = server.drain_timeout_s
        self._http = EmbeddedServer(app, server.host, server.port)
        lanes = [(model, lane) for model in models.values() for lane in model.lanes.values()]
        self._tasks = [asyncio.create_task(self._beat())]
        self._tasks += [asyncio.create_task(watch_lane(model, lane, metrics)) for model, lane in lanes]
        await _until_known([lane for _, lane in lanes])
        await self._http.start()

    async def _beat(self) -> None:
        while True:
            try:
                orders = await self._hub.push()
            except Exception as error:
                logger.warning("the hub did not take the metrics: %r", error)
            else:
                self._connect(orders.endpoints)
                self._learn(orders.standings)
                if orders.drain and not self._service.is_draining:
                    self._service.drain()
                    continue  # Say so at once.
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _connect(self, endpoints: Iterable[Endpoint]) -> None:
        """Connect to the replicas that the hub knows."""
        by_tier: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            by_tier.setdefault(endpoint.tier, []).append(endpoint)
        for tier, client in self._clients.items():
            client.update(by_tier.get(tier, ()))

    def _learn(self, standings: Mapping[str, Mapping[str, Standing]]) -> None:
        """Take in what the hub knows of every tier, and see to it that rows are compared."""
        for model in self._service.models:
            if model.precision is not None:
                model.precision.learn(standings.get(model.name, {}))
                model.precision.start()

    async def check_health(self) -> None:
        """Raise when the HTTP server or a background task has ended."""
        if not self._http.is_serving:
            raise RuntimeError("the HTTP server has stopped")
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"a background task has ended: {task.get_name()}")

    async def __del__(self) -> None:  # Serve awaits it when the replica stops.
        for task in getattr(self, "_tasks", []):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if hasattr(self, "_http"):
            await self._http.stop(self._drain_timeout_s)
        if hasattr(self, "_service"):
            for model in self._service.models:
                if model.precision is not None:
                    await model.precision.stop()
        for client in getattr(self, "_clients", {}).values():
            client.close()


def _tier_client(
    handle: DeploymentHandle,
    labels: tuple[str, str],
    server: ServerConfig,
    key: bytes,
    metrics: GatewayMetrics,
) -> ChannelTierClient:
    """`labels`: model and tier."""
    name, timeout_s = "/".join(labels), server.request_timeout_s
    ways = {way: metrics.batches.labels(*labels, way) for way in get_args(BatchWay)}
    fallback = ServeTierClient(handle, name, timeout_s)
    return ChannelTierClient(name, fallback, key, timeout_s, lambda way: ways[way].inc())


async def _until_known(lanes: list[Lane]) -> None:
    """Wait a moment for the tiers' first reports.

    A gateway that is started beside others shares their port at once: it should know the tiers
    when its first request comes. At the first start they load, and it must not wait for that.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KNOWN_TIMEOUT_S):
            while any(lane.description is None for lane in lanes):  # noqa: ASYNC110  Set by many tasks.
                await asyncio.sleep(0.05)


def _set_build_info(metrics: GatewayMetrics) -> None:
    def found(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    metrics.build_info.labels(__version__, found("torch"), found("torch_npu"), found("ray")).set(1)
