"""A tier's replica: one precision, one process, one thread that runs the device."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import ipaddress
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.serve.handle import DeploymentHandle

from serving.channel.endpoint import Endpoint
from serving.channel.server import ChannelServer
from serving.errors import (
    Deadline,
    DeviceLost,
    DeviceOutOfMemory,
    HalftoneError,
    NotReady,
    PrecisionUnavailable,
    RequestError,
)
from serving.gateway.tier_client import BatchResult, TierDescription, TierReport
from serving.models.resolve import CallableSource
from serving.observe.logs import configure_logging
from serving.runtime.engine import Engine, open_plan_source
from serving.runtime.replica_ledger import Announcement, ReplicaState
from serving.runtime.tier_plan import TierPlan
from serving.tensors import Signature, Tensors

logger = logging.getLogger("halftone.tier")

_T = TypeVar("_T")

#: Between two checks of switches, probe and known answer.
CHECK_INTERVAL_S = 10.0
#: Between two looks at whether the device thread makes progress.
HANG_POLL_S = 1.0
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
    #: A batch that computes for longer is taken for one that never ends.
    batch_limit_s: float = math.inf


class TierReplica:
    """Loads a tier and computes its batches.

    A tier that cannot load still starts, and reports why: the reason belongs on
    `/v2/health/ready`, and restarting would not cure it. So does one whose arithmetic was
    altered after the start. A replica whose device failed ends, and Serve starts another.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it; type checkers want None.
        self, plan: TierPlan, channel: ChannelPlan, hub: DeploymentHandle
    ) -> None:
        """Load, and say so to the hub meanwhile."""
        configure_logging(plan.log)
        self._plan = plan
        self._channel_plan = channel
        self._announce = hub.options(method_name="announce")
        self._channel = ChannelServer(self.run, channel.key, max_inflight=channel.max_inflight)
        self._name = f"tier {plan.tier} of {plan.model.name}"
        # Unique to this life.
        self._replica = f"{plan.deployment_name}#{secrets.token_hex(8)}"
        self._endpoint: Endpoint | None = None
        self._memory_bytes: Mapping[str, int] = {}
        self._is_loading = True
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._engine: Engine | None = None
        #: When the device thread began what it does now; None while it waits.
        self._began_s: float | None = None
        self._signature: Signature | None = None
        self._example: Tensors = {}
        self._is_plain = False
        self._failure: str | None = None
        self._unavailable: str | None = None
        #: Why the process ends in a moment; None while it goes on.
        self._ends_because: str | None = None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._announce_again_and_again())]
        try:
            self._engine = await loop.run_in_executor(self._device_thread, self._load)
        except PrecisionUnavailable as error:
            self._unavailable = str(error)
        except HalftoneError as error:
            self._failure = str(error)
        except (Exception, SystemExit) as error:  # The model's builder is foreign code.
            logger.exception("%s failed to load", self._name)
            self._failure = f"{type(error).__name__}: {error}"
        if reason := self._failure or self._unavailable:
            logger.error("%s: %s", self._name, reason)
        self._is_loading = False
        if self._engine is not None:
            self._endpoint = await self._channel.start(plan.deployment_name, self._replica, _tcp_host())
            self._tasks += [
                loop.create_task(self._check_again_and_again(self._engine)),
                loop.create_task(self._end_when_hung(self._channel_plan.batch_limit_s)),
            ]

    def _load(self) -> Engine:
        source = open_plan_source(self._plan)
        self._signature = source.signature
        self._is_plain = isinstance(source, CallableSource)
        self._example = source.examples()
        return Engine.load(self._plan, source)

    async def run(self, batch: Tensors, timeout_s: float = math.inf) -> BatchResult | RequestError:
        """Compute one batch on the device thread, unless that takes it up after `timeout_s`.

        A request's error is returned, not raised: raised, it would reach the gateway wrapped
        in Ray's own exceptions, which stand for a lost replica there.
        """
        if self._ends_because is not None:
            return DeviceLost(self._ends_because)  # Another replica can compute it.
        if self._engine is None or self._failure is not None:
            return NotReady(f"{self._name} does not serve; /v2/health/ready says why")
        loop = asyncio.get_running_loop()
        deadline_s = time.monotonic() + timeout_s
        try:
            return await loop.run_in_executor(
                self._device_thread, self._watched, self._in_time, self._engine, batch, deadline_s
            )
        except DeviceLost as error:
            self._end(str(error))
            return error
        except RequestError as error:
            return error

    def _in_time(self, engine: Engine, batch: Tensors, deadline_s: float) -> BatchResult:
        """Compute a batch for which somebody still waits."""
        if time.monotonic() > deadline_s:
            raise Deadline("the request's time ran out while it waited in the tier")
        return engine.run(batch)

    def _watched(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Do something on the device thread, where `_end_when_hung` sees how long it takes."""
        self._began_s = time.monotonic()
        try:
            return work(*arguments)
        finally:
            self._began_s = None

    async def report(self, *, with_example: bool) -> TierReport:
        """What this replica is, or why it does not serve.

        Raises:
            DeviceLost: it ends. That says nothing of the tier, which has or gets other replicas.
        """
        if self._ends_because is not None:
            raise DeviceLost(self._ends_because)
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
        example = self._example if with_example else {}
        return TierReport(description, self._signature, example, self._is_plain)

    async def check_health(self) -> None:
        """Serve asks now and then: the replica is well unless its device is not."""
        if self._engine is not None and self._engine.device.poisoned:
            raise DeviceLost("the device failed")

    async def _announce_again_and_again(self) -> None:
        """Say where and how this replica is, again and again: the hub may be a new one."""
        loop = asyncio.get_running_loop()
        measuring: asyncio.Future[Mapping[str, int]] | None = None
        while True:
            await self._say(self._announcement())
            if measuring is not None and measuring.done():
                self._memory_bytes, measuring = measuring.result(), None
            if measuring is None and self._engine is not None:
                # Behind the batches: the device is asked on its own thread, and nothing waits for it.
                measuring = loop.run_in_executor(self._device_thread, _memory_bytes, self._engine)
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def _announcement(self, *, is_goodbye: bool = False) -> Announcement:
        serves = self._state in {"serving", "degraded"}
        return Announcement(
            self._plan.deployment_name,
            self._replica,
            self._state,
            self._memory_bytes,
            self._endpoint if serves else None,
            is_goodbye,
        )

    @property
    def _state(self) -> ReplicaState:
        if self._is_loading:
            return "loading"
        if self._unavailable is not None:
            return "refused"
        if self._engine is None or self._failure is not None or self._ends_because is not None:
            return "failed"
        return "degraded" if self._engine.is_degraded else "serving"

    async def _say(self, said: Announcement) -> None:
        try:
            async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
                await self._announce.remote(said)
        except Exception as error:
            logger.warning("%s: the hub does not hear it: %r", self._name, error)

    async def close(self) -> None:
        """Finish what gateways have sent, and take nothing more."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        goodbye = self._announcement(is_goodbye=True)
        await asyncio.gather(self._say(goodbye), self._channel.close(CLOSE_TIMEOUT_S))

    async def __del__(self) -> None:  # Serve awaits it when the replica stops.
        if hasattr(self, "_tasks"):  # It was made.
            await self.close()

    async def _end_when_hung(self, limit_s: float) -> None:
        """End the process when the device thread, or everything in it, makes no progress.

        The device thread may be stuck alone: then this loop sees it. Code that keeps the
        interpreter's lock stops this loop too: then `faulthandler`, which needs no lock,
        writes where every thread is, and ends the process.
        """
        while True:
            if math.isfinite(limit_s):
                faulthandler.dump_traceback_later(limit_s + HANG_POLL_S, exit=True)
            try:
                await asyncio.sleep(HANG_POLL_S)
            finally:
                faulthandler.cancel_dump_traceback_later()
            began_s = self._began_s
            if began_s is not None and time.monotonic() - began_s > limit_s:
                self._end(f"its device has been busy with one batch for more than {limit_s:g} s")
                return

    async def _check_again_and_again(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        while self._failure is None:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                self._failure = await loop.run_in_executor(self._device_thread, self._watched, engine.altered)
                broken = await loop.run_in_executor(self._device_thread, self._watched, engine.broken)
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
        self._ends_because = self._ends_because or reason
        asyncio.get_running_loop().call_later(EXIT_DELAY_S, os._exit, 1)


def _memory_bytes(engine: Engine) -> Mapping[str, int]:
    """Memory in use, by kind; nothing where the device does not say. Runs on the device thread."""
    try:
        with engine.device.running():
            return engine.device.memory_bytes()
    except Exception as error:
        logger.debug("the device does not tell its memory: %r", error)
        return {}


def _tcp_host() -> str | None:
    """The address at which other nodes reach this one; None on a cluster of one node."""
    address: str = ray.util.get_node_ip_address()
    return None if ipaddress.ip_address(address).is_loopback else address
