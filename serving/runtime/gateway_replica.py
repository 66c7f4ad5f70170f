"""A gateway's replica: the embedded HTTP server, its service, and the beat to the hub."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry
from ray.serve.handle import DeploymentHandle

from serving import __version__
from serving.channel.client import BatchWay, ChannelTierClient
from serving.channel.endpoint import Endpoint
from serving.config import Config, ServerConfig
from serving.divergence.standing import Standing
from serving.errors import NotReady
from serving.gateway.auth import Authenticator
from serving.gateway.figures import Outbox
from serving.gateway.model import Lane, ServedModel
from serving.gateway.precision import ModelPrecision
from serving.gateway.precision_record import ModelFigures
from serving.gateway.service import Service
from serving.gateway.token_watch import TokenWatch
from serving.gateway.watch import watch_lane
from serving.observe.logs import configure_logging
from serving.observe.metrics import GatewayMetrics
from serving.observe.snapshot import Family, take_snapshot
from serving.protocol.http_app import HttpApp
from serving.protocol.server import EmbeddedServer
from serving.runtime.hub_memory import HubMemory
from serving.runtime.hub_replica import Beat, Orders
from serving.runtime.serve_tier_client import ServeTierClient
from serving.runtime.tier_plan import deployment_name

logger = logging.getLogger("halftone.gateway")

BEAT_INTERVAL_S = 0.5
#: For the reports of tiers that run already, before a new gateway listens.
KNOWN_TIMEOUT_S = 2.0
#: For clients of kept connections to send a request, and be told to connect anew.
RECONNECT_NOTICE_S = 2.0
#: For the hub to answer; a page that takes longer is refused.
HUB_TIMEOUT_S = 2.0
#: For a gateway that ends to hand its figures over; a hub that is replaced needs seconds to start.
HAND_OVER_S = 15.0
#: Files and sockets of a gateway beside its clients' connections.
OTHER_FILES = 512

_T = TypeVar("_T")


class RemoteHub:
    """The hub, which is told this gateway's own figures with every question."""

    def __init__(
        self, hub: DeploymentHandle, registry: CollectorRegistry, service: Callable[[], Service]
    ) -> None:
        """`service`: the gateway's own, asked at each beat for what it is doing at that moment."""
        self._push = hub.options(method_name="push")
        self._render = hub.options(method_name="push_and_render")
        self._merge = hub.options(method_name="push_and_merge")
        self._list = hub.options(method_name="push_and_list")
        self._render_process = hub.options(method_name="push_and_render_process")
        self._set_tier = hub.options(method_name="set_tier")
        self._memory = HubMemory(hub)
        self._is_last = False
        self._registry = registry
        # Unique to this life of this process, wherever it runs.
        self._process = f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}"
        self._service = service
        self._outbox = Outbox(self._take_figures)

    def _beat(self) -> Beat:
        service = self._service()
        return Beat(
            self._process,
            self._memory.hub,
            take_snapshot(self._registry),
            service.inflight_requests,
            service.is_draining,
            self._is_last,
            self._outbox.parcels(),
            {name: precision.standings for name, precision in self._measured().items()},
        )

    def _measured(self) -> dict[str, ModelPrecision]:
        models = self._service().models
        return {model.name: model.precision for model in models if model.precision is not None}

    def _take_figures(self) -> dict[str, ModelFigures]:
        return {name: precision.take_figures() for name, precision in self._measured().items()}

    def learn(self, standings: Mapping[str, Mapping[str, Standing]]) -> None:
        """What the hub knows of every tier."""
        for name, precision in self._measured().items():
            precision.learn(standings.get(name, {}))

    async def _tell(self, method: DeploymentHandle, *arguments: object) -> Any:
        """Call the hub with this gateway's beat. Until it answers, the beat's figures are told again."""
        beat = self._beat()
        async with asyncio.timeout(HUB_TIMEOUT_S):
            answer = await method.remote(beat, *arguments)
        self._outbox.told(beat.parcels)
        return answer

    async def page(self, openmetrics: bool) -> bytes:
        """The rendered page."""
        page: bytes | None = await self._tell(self._render, openmetrics)
        return _settled(page)

    async def families(self) -> list[Family]:
        """The merged families."""
        families: list[Family] | None = await self._tell(self._merge)
        return _settled(families)

    async def processes(self) -> list[str]:
        """Live processes with a page of their own."""
        processes: list[str] = await self._tell(self._list)
        return processes

    async def process_page(self, process: str, openmetrics: bool) -> bytes | None:
        """One process's page; None where it does not live."""
        page: bytes | None = await self._tell(self._render_process, process, openmetrics)
        return page

    async def set_tier(self, model: str, tier: str, action: str, reason: str) -> None:
        """Trip or reset a tier by hand."""
        async with asyncio.timeout(HUB_TIMEOUT_S):
            standings = await self._set_tier.remote(model, tier, action, reason)
        # At once: from here on this gateway could tell another hub.
        self.learn(standings)

    async def push(self) -> Orders:
        """Push the figures. Returns what to do."""
        orders: Orders = await self._tell(self._push)
        async with asyncio.timeout(HUB_TIMEOUT_S):
            await self._memory.keep(self._process, orders)
        return orders

    async def hand_over(self) -> None:
        """Tell the last figures, until a hub has them and another gateway keeps them for the next hub.

        An update replaces the hub and a gateway at once: neither may take totals with it.
        """
        self._is_last = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                while not await self._is_handed_over():  # noqa: ASYNC110  The hub is another process.
                    await asyncio.sleep(BEAT_INTERVAL_S)

    async def _is_handed_over(self) -> bool:
        try:
            orders = await self.push()
        except Exception as error:  # The hub is being replaced as well.
            logger.warning("the hub did not take the last figures: %r", error)
            return False
        return orders.is_kept or orders.is_forgotten


def _settled(answer: _T | None) -> _T:
    if answer is None:
        raise NotReady("the process that merges the metrics has just started")
    return answer


class GatewayReplica:
    """Serves HTTP on the configured port; several share it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it; type checkers want None.
        self,
        config: Config,
        tiers: dict[str, dict[str, DeploymentHandle]],
        hub: DeploymentHandle,
        channel_key: bytes,
        is_successor: bool,
    ) -> None:
        """Start.

        Args:
            config: the whole one.
            tiers: model -> tier -> handle.
            hub: the application's.
            channel_key: this run's secret.
            is_successor: whether another application serves the port now, so that this gateway
                must not listen before each of its tiers answers.
        """
        server = config.server
        configure_logging(server.log)
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
        tokens = TokenWatch(server.tokens_file) if server.tokens_file else None
        authenticator = tokens.authenticator if tokens else Authenticator(None)
        self._hub = RemoteHub(hub, metrics.registry, lambda: self._service)
        self._service = Service(server, models, metrics, authenticator, self._hub)
        self._http = _http_server(server, self._service)
        self._drain_timeout_s = server.drain_timeout_s
        self._is_forgotten = False
        self._retirement: asyncio.Task[None] | None = None
        lanes = [(model, lane) for model in models.values() for lane in model.lanes.values()]
        self._tasks = [asyncio.create_task(self._beat())]
        if tokens is not None:
            self._tasks.append(asyncio.create_task(tokens.run()))
        self._tasks += [asyncio.create_task(watch_lane(model, lane, metrics)) for model, lane in lanes]
        if is_successor:
            await _until_ready([lane for _, lane in lanes])
        else:
            await _until_known([lane for _, lane in lanes])
        _calm_collector()
        _allow_open_files(server.max_connections)
        await self._http.start()

    async def _beat(self) -> None:
        while True:
            try:
                orders = await self._hub.push()
            except Exception as error:
                logger.warning("the hub did not take the metrics: %r", error)
            else:
                self._is_forgotten = orders.is_forgotten
                self._connect(orders.endpoints)
                self._learn(orders.standings)
                if orders.retire and self._retirement is None:
                    self._retirement = asyncio.create_task(self._retire())
                if orders.drain and not self._service.is_draining:
                    self._service.drain()
                    continue  # Say so at once.
            await asyncio.sleep(BEAT_INTERVAL_S)

    async def _retire(self) -> None:
        """Hand every connection over to the gateways of another application, and finish what is here."""
        self._service.retire()
        await asyncio.sleep(RECONNECT_NOTICE_S)
        await self._http.leave(self._drain_timeout_s)
        self._service.drain()

    def _connect(self, endpoints: Iterable[Endpoint]) -> None:
        """Connect to the replicas that the hub knows."""
        by_tier: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            by_tier.setdefault(endpoint.tier, []).append(endpoint)
        for tier, client in self._clients.items():
            client.update(by_tier.get(tier, ()))

    def _learn(self, standings: Mapping[str, Mapping[str, Standing]]) -> None:
        """Take in what the hub knows of every tier, and see to it that rows are compared."""
        self._hub.learn(standings)
        for model in self._service.models:
            if model.precision is not None:
                model.precision.start()

    async def check_health(self) -> None:
        """Raise when the HTTP server or a background task has ended, or the hub forgot this process."""
        if self._is_forgotten:
            raise RuntimeError("silent for too long: its totals were counted, and it must start anew")
        if not self._http.is_serving and self._retirement is None:
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
            await self._hub.hand_over()
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


def _http_server(server: ServerConfig, service: Service) -> EmbeddedServer:
    """Not started yet."""
    app = HttpApp(
        service.handle,
        refuse=service.refuse,
        max_body_bytes=server.max_body_bytes,
        max_held_bytes=server.max_held_bytes,
        body_timeout_s=server.body_timeout_s,
    )
    return EmbeddedServer(
        app,
        server.host,
        server.port,
        max_connections=server.max_connections,
        tls_certificate=server.tls_certificate,
        tls_key=server.tls_key,
    )


def _allow_open_files(connections: int) -> None:
    """See to it that so many connections may be open, as far as the system lets this process."""
    wanted = connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            logger.warning("%d files may be open here, too few for server.max_connections", hard)


def _calm_collector() -> None:
    """Have the garbage collector look rarely, and never at what the imports left behind.

    Requests leave next to no cycles, and a full collection would walk every object of Ray's modules
    while all requests wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _until_known(lanes: list[Lane]) -> None:
    """Wait a moment for the tiers' first reports.

    A gateway that is started beside others shares their port at once: it should know the tiers
    when its first request comes. At the first start they load, and it must not wait for that.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KNOWN_TIMEOUT_S):
            while any(lane.description is None for lane in lanes):  # noqa: ASYNC110  Set by many tasks.
                await asyncio.sleep(0.05)


async def _until_ready(lanes: list[Lane]) -> None:
    """Wait until every tier answers, or says that its device cannot honour it."""
    while any(lane.problem is not None for lane in lanes):  # noqa: ASYNC110  Set by many tasks.
        await asyncio.sleep(0.05)


def _set_build_info(metrics: GatewayMetrics) -> None:
    def found(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    metrics.build_info.labels(__version__, found("torch"), found("torch_npu"), found("ray")).set(1)
