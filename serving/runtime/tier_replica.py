"""A tier's replica: one precision, one process, one thread that runs the device."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from serving.errors import HalftoneError, NotReady, RequestError
from serving.gateway.tier_client import BatchResult, TierDescription, TierReport
from serving.models.resolve import CallableSource
from serving.runtime.engine import Engine, open_plan_source
from serving.runtime.tier_plan import TierPlan
from serving.tensors import Signature, Tensors

logger = logging.getLogger("halftone.tier")


class TierReplica:
    """Loads a tier and computes its batches.

    A tier that cannot load still starts, and reports why: the reason belongs on
    `/v2/health/ready`, and restarting would not cure it.
    """

    def __init__(self, plan: TierPlan) -> None:
        self._plan = plan
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._engine: Engine | None = None
        self._signature: Signature | None = None
        self._example: Tensors = {}
        self._is_plain = False
        self._failure: str | None = None
        try:
            self._device_thread.submit(self._load).result()
        except HalftoneError as error:
            self._failure = str(error)
        except Exception as error:
            logger.exception("tier %s of %s failed to load", plan.tier, plan.model.name)
            self._failure = f"{type(error).__name__}: {error}"
        if self._failure is not None:
            logger.error("tier %s of %s: %s", plan.tier, plan.model.name, self._failure)

    def _load(self) -> None:
        source = open_plan_source(self._plan)
        self._signature = source.signature
        self._example = source.examples()
        self._is_plain = isinstance(source, CallableSource)
        self._engine = Engine.load(self._plan, source)

    async def run(self, batch: Tensors) -> BatchResult | RequestError:
        """Compute one batch on the device thread.

        A request's error is returned, not raised: raised, it would reach the gateway wrapped
        in Ray's own exceptions, which stand for a lost replica there.
        """
        if self._engine is None:
            return NotReady(f"tier {self._plan.tier} of {self._plan.model.name} failed to start")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._device_thread, self._engine.run, batch)
        except RequestError as error:
            return error

    async def report(self) -> TierReport:
        """What this replica is, or why it does not serve."""
        if self._engine is not None:
            description = self._engine.description
        else:
            description = TierDescription(device="none", soc="none", effective="none", failure=self._failure)
        return TierReport(description, self._signature, self._example, self._is_plain)
