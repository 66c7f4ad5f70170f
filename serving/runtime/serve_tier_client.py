"""`TierClient` over a Ray Serve handle: one Serve call per batch.

Serve knows the replicas and picks one with few calls under way; a batch whose replica
died is sent once more.
"""

from __future__ import annotations

import asyncio
import logging
import math

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serving.errors import DeviceLost, RequestError, TierLost
from serving.gateway.tier_client import ATTEMPTS, BatchResult, TierReport, lost_with_replicas
from serving.tensors import Tensors

logger = logging.getLogger("halftone.gateway")

#: A replica that lost its device ends within this time, and Serve takes it out.
LOST_DEVICE_PAUSE_S = 0.2


class ServeTierClient:
    """Reaches one tier through its deployment's handle."""

    def __init__(self, handle: DeploymentHandle, name: str, timeout_s: float) -> None:
        """`timeout_s`: for one batch, all attempts together."""
        self._run = handle.options(method_name="run")
        self._report = handle.options(method_name="report")
        self._name = name
        self._timeout_s = timeout_s

    async def run(
        self, batch: Tensors, *, deadline_s: float = math.inf, attempts: int = ATTEMPTS
    ) -> BatchResult:
        """Compute a batch, tried `attempts` times at most; see `TierClient.run`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._attempt(batch, deadline_s, attempts)
        except TimeoutError as error:
            raise TierLost(f"tier {self._name} did not answer within {self._timeout_s:g} s") from error

    async def _attempt(self, batch: Tensors, deadline_s: float, attempts: int) -> BatchResult:
        lost: Exception | None = None
        loop = asyncio.get_running_loop()
        for attempt in range(1, attempts + 1):
            try:
                answer: BatchResult | RequestError = await self._run.remote(batch, deadline_s - loop.time())
            except (RayError, RayServeException) as error:
                logger.warning(
                    "tier %s: attempt %d lost its replica: %s", self._name, attempt, type(error).__name__
                )
                lost = error
                continue
            if isinstance(answer, DeviceLost):
                lost = answer
                await asyncio.sleep(LOST_DEVICE_PAUSE_S)
                continue
            if isinstance(answer, RequestError):
                raise answer
            return answer
        raise lost_with_replicas(self._name, attempts, 0) from lost

    async def report(self, *, with_example: bool) -> TierReport:
        """What the tier is. Waits until a replica has started."""
        report: TierReport = await self._report.remote(with_example=with_example)
        return report
