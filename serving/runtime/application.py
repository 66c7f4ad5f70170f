"""The Serve application seen from the process that started it: deployed, watched, replaced, drained."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from ray import serve
from ray.serve.schema import ApplicationStatus, LoggingConfig

from serving.config import Config
from serving.divergence.standing import Standing
from serving.errors import HalftoneError
from serving.gateway.tier_client import TierReport
from serving.runtime.app import HUB_DEPLOYMENT, build_app
from serving.runtime.tier_plan import APP_NAME, plan_tiers

#: Model -> tier -> its state, and what it rests on.
Standings = Mapping[str, Mapping[str, Standing]]

_T = TypeVar("_T")
_POLL_INTERVAL_S = 0.1
#: For the hub to say what it knows.
_HUB_TIMEOUT_S = 10.0


class RunningApplication:
    """An application of this process's cluster."""

    def __init__(self, config: Config, predecessor: RunningApplication | None = None) -> None:
        """Deploy. Returns at once: replicas start meanwhile.

        Args:
            config: checked.
            predecessor: serves the port now. The new gateways listen once all their tiers answer.
        """
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._config = config
        self._number = 1 if predecessor is None else predecessor.next_number()
        self._last_number = self._number
        self._name = APP_NAME if self._number == 1 else f"{APP_NAME}-{self._number}"
        standings = None if predecessor is None else predecessor.standings()
        serve.start(http_options={"location": "NoServer"}, logging_config=LoggingConfig(log_level="WARNING"))
        app = build_app(config, _channel_key(), standings)
        serve.run_many(
            [serve.RunTarget(app, name=self._name, route_prefix=None)], wait_for_applications_running=False
        )

    def next_number(self) -> int:
        """A number that no successor of this application has had, whatever became of it."""
        self._last_number += 1
        return self._last_number

    def check(self) -> None:
        """See whether every deployment starts.

        Raises:
            HalftoneError: one failed to, with what Serve knows of the reason.
        """
        application = serve.status().applications.get(self._name)
        if application is None or application.status != ApplicationStatus.DEPLOY_FAILED:
            return
        messages = [overview.message for overview in application.deployments.values() if overview.message]
        # A message ends with the traceback whose last line says what happened.
        reasons = [message.strip().splitlines()[-1] for message in messages]
        raise HalftoneError(f"the server could not start: {'; '.join(reasons) or application.message}")

    def wait_until_it_serves(self, is_over: Callable[[], bool]) -> None:
        """Wait until every tier has loaded and every gateway listens.

        Args:
            is_over: whether to give up.

        Raises:
            HalftoneError: a tier failed to load, a process failed to start, or `is_over`.
        """
        _run(self._until_it_serves(is_over))

    async def _until_it_serves(self, is_over: Callable[[], bool]) -> None:
        names = [plan.deployment_name for plan in plan_tiers(self._config)]
        reports = {name: asyncio.create_task(self._report(name)) for name in names}
        try:
            while not all(report.done() for report in reports.values()) or not self._is_running():
                self.check()
                for name, report in reports.items():
                    if report.done() and (failure := report.result().description.failure):
                        raise HalftoneError(f"{name.replace(':', '/')}: {failure}")
                if is_over():
                    raise HalftoneError("the server is told to stop")
                await asyncio.sleep(_POLL_INTERVAL_S)
        finally:
            for report in reports.values():
                report.cancel()
            await asyncio.gather(*reports.values(), return_exceptions=True)

    async def _report(self, deployment: str) -> TierReport:
        handle = serve.get_deployment_handle(deployment, self._name).options(method_name="report")
        try:
            report: TierReport = await handle.remote(with_example=False)
        except Exception as error:
            raise HalftoneError(f"{deployment.replace(':', '/')}: no replica started") from error
        return report

    def _is_running(self) -> bool:
        application = serve.status().applications.get(self._name)
        return application is not None and application.status == ApplicationStatus.RUNNING

    def standings(self) -> Standings:
        """What is known of every tier.

        Raises:
            HalftoneError: the hub does not answer now.
        """
        return _run(self._standings())

    async def _standings(self) -> Standings:
        hub = serve.get_deployment_handle(HUB_DEPLOYMENT, self._name).options(method_name="standings")
        try:
            async with asyncio.timeout(_HUB_TIMEOUT_S):
                found: Standings = await hub.remote()
        except Exception as error:  # Ray's, Serve's or a timeout: a tier out of service must stay so.
            raise HalftoneError("the process that knows the tiers' state does not answer") from error
        return found

    def retire(self, timeout_s: float) -> None:
        """Have another application's gateways take every connection over, and remove this one."""
        _run(_finish(self._name, "retire", timeout_s))
        self.remove()

    def remove(self) -> None:
        """Stop all processes of the application."""
        serve.delete(self._name)

    def drain(self, timeout_s: float) -> None:
        """Have the gateways refuse new requests, and wait until those in flight are answered."""
        _run(_finish(self._name, "drain", timeout_s))


def _channel_key() -> bytes:
    """The secret of this run's data channels, made from the token that this run's Ray asks for."""
    return hmac.digest(os.environ["RAY_AUTH_TOKEN"].encode(), b"halftone data channel", "sha256")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls: Serve ties what it knows of replicas to the loop of the first one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="serve-calls", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


async def _finish(application: str, method: str, timeout_s: float) -> None:
    """Call the hub's `drain` or `retire` until no gateway has anything left to do."""
    hub = serve.get_deployment_handle(HUB_DEPLOYMENT, application).options(method_name=method)
    try:
        async with asyncio.timeout(timeout_s):
            while await hub.remote():  # noqa: ASYNC110  The gateways are other processes.
                await asyncio.sleep(_POLL_INTERVAL_S)
    except TimeoutError:
        return  # The operator's limit: what is still running is cut off.
