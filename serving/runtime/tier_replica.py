"""A tier's replica: one precision, one process, one thread that runs the device."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ray
from ray.serve.handle import DeploymentHandle

from serving.channel.server import ChannelServer
from serving.errors import (
    DeviceLost,
    DeviceOutOfMemory,
    HalftoneError,
    NotReady,
    PrecisionUnavailable,
    RequestError,
)
from serving.gateway.tier_client import BatchResult, TierDescription, TierReport
from serving.models.resolve import CallableSource
from serving.runtime.engine import Engine, open_plan_source
from serving.runtime.tier_plan import TierPlan
from serving.tensors import Signature, Tensors

logger = logging.getLogger("halftone.tier")

#: Between two checks of switches, probe and known answer.
CHECK_INTERVAL_S = 10.0
#: From the failure of the device to the end of the process: the reply goes out meanwhile.
EXIT_DELAY_S = 0.05


#: Between two announcements of where this replica listens.
ANNOUNCE_INTERVAL_S = 1.0
ANNOUNCE_TIMEOUT_S = 2.0
#: For batches under way when the replica is told to stop.
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """What a replica's data channel needs to know."""

    key: bytes
    #: Batches under way at most, of all gateways together.
    max_inflight: int


class TierReplica:
    """Loads a tier and computes its batches.

    A tier that cannot load still starts, and reports why: the reason belongs on
    `/v2/health/ready`, and restarting would not cure it. So does one whose arithmetic was
    altered after the start. A replica whose device failed ends, and Serve starts another.
    """

    def __init__(self, plan: TierPlan, channel: ChannelPlan, hub: DeploymentHandle) -> None:
        self._plan = plan
        self._channel_plan = channel
        self._announce = hub.options(method_name="announce")
        self._channel = ChannelServer(self.run, channel.key, max_inflight=channel.max_inflight)
        self._name = f"tier {plan.tier} of {plan.model.name}"
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._engine: Engine | None = None
        self._signature: Signature | None = None
        self._example: Tensors = {}
        self._is_plain = False
        self._failure: str | None = None
        self._unavailable: str | None = None
        try:
            self._device_thread.submit(self._load).result()
        except PrecisionUnavailable as error:
            self._unavailable = str(error)
        except HalftoneError as error:
            self._failure = str(error)
        except Exception as error:
            logger.exception("%s failed to load", self._name)
            self._failure = f"{type(error).__name__}: {error}"
        if reason := self._failure or self._unavailable:
            logger.error("%s: %s", self._name, reason)
        self._tasks: list[asyncio.Task[None]] = []

    def _load(self) -> None:
        source = open_plan_source(self._plan)
        self._signature = source.signature
        self._is_plain = isinstance(source, CallableSource)
        self._example = source.examples()
        self._engine = Engine.load(self._plan, source)

    async def run(self, batch: Tensors) -> BatchResult | RequestError:
        """Compute one batch on the device thread.

        A request's error is returned, not raised: raised, it would reach the gateway wrapped
        in Ray's own exceptions, which stand for a lost replica there.
        """
        if self._engine is None or self._failure is not None:
            return NotReady(f"{self._name} does not serve; /v2/health/ready says why")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._device_thread, self._engine.run, batch)
        except DeviceLost as error:
            self._end(str(error))
            return error
        except RequestError as error:
            return error

    async def report(self) -> TierReport:
        """What this replica is, or why it does not serve."""
        self._start_tasks()
        if self._engine is not None and self._failure is None:
            description = self._engine.description
        else:
            description = TierDescription(
                device="none",
                soc="none",
                effective="none",
                failure=self._failure,
                unavailable=self._unavailable,
            )
        return TierReport(description, self._signature, self._example, self._is_plain)

    async def check_health(self) -> None:
        """Serve asks now and then: the replica is well unless its device is not."""
        self._start_tasks()
        if self._engine is not None and self._engine.device.poisoned:
            raise DeviceLost("the device failed")

    def _start_tasks(self) -> None:
        """Start what runs beside requests, once: a replica is made outside of its event loop."""
        if self._engine is None or self._tasks:
            return
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._check_again_and_again(self._engine)),
            loop.create_task(self._serve_channel()),
        ]

    async def _serve_channel(self) -> None:
        """Listen for gateways, and say where, again and again: the hub may be a new one."""
        replica = f"{self._plan.deployment_name}#{secrets.token_hex(8)}"
        endpoint = await self._channel.start(self._plan.deployment_name, replica, _tcp_host())
        while True:
            try:
                async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
                    await self._announce.remote(endpoint)
            except Exception as error:
                logger.warning("%s: the hub did not take its address: %r", self._name, error)
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    async def close(self) -> None:
        """Finish what gateways have sent, and take nothing more."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._channel.close(CLOSE_TIMEOUT_S)

    async def __del__(self) -> None:  # Serve awaits it when the replica stops.
        if hasattr(self, "_tasks"):  # It was made.
            await self.close()

    async def _check_again_and_again(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        while self._failure is None:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                self._failure = await loop.run_in_executor(self._device_thread, engine.altered)
                broken = await loop.run_in_executor(self._device_thread, engine.broken)
            except DeviceOutOfMemory as error:
                # Memory is short, which proves nothing against the device; it is asked again.
                logger.warning("%s: no room for its known answer: %s", self._name, error)
                broken = None
            except Exception as error:
                broken = f"{type(error).__name__}: {error}"
            if self._failure is not None:
                logger.error("%s leaves service: %s", self._name, self._failure)
            elif broken is not None:
                self._end(broken)
                return

    def _end(self, reason: str) -> None:
        """End the process: nothing that this device returns can be trusted any more."""
        logger.error("%s ends, to be replaced: %s", self._name, reason)
        self._failure = self._failure or reason
        asyncio.get_running_loop().call_later(EXIT_DELAY_S, os._exit, 1)


def _tcp_host() -> str | None:
    """The address at which other nodes reach this one; None on a cluster of one node."""
    address: str = ray.util.get_node_ip_address()
    return None if ipaddress.ip_address(address).is_loopback else address
