"""The Serve application seen from the process that started it: deployed, watched, drained."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os

from ray import serve
from ray.serve.schema import ApplicationStatus, LoggingConfig

from serving.config import Config
from serving.errors import HalftoneError
from serving.runtime.app import HUB_DEPLOYMENT, build_app
from serving.runtime.tier_plan import APP_NAME

_POLL_INTERVAL_S = 0.1


class RunningApplication:
    """The one application of this process's cluster."""

    def __init__(self, config: Config) -> None:
        """Deploy. Returns at once: replicas start meanwhile."""
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"location": "NoServer"}, logging_config=LoggingConfig(log_level="WARNING"))
        serve.run_many(
            [serve.RunTarget(build_app(config, _channel_key()), name=APP_NAME, route_prefix=None)],
            wait_for_applications_running=False,
        )

    def check(self) -> None:
        """See whether every deployment starts.

        Raises:
            HalftoneError: one failed to, with what Serve knows of the reason.
        """
        application = serve.status().applications.get(APP_NAME)
        if application is None or application.status != ApplicationStatus.DEPLOY_FAILED:
            return
        messages = [overview.message for overview in application.deployments.values() if overview.message]
        # A message ends with the traceback whose last line says what happened.
        reasons = [message.strip().splitlines()[-1] for message in messages]
        raise HalftoneError(f"the server could not start: {'; '.join(reasons) or application.message}")

    def drain(self, timeout_s: float) -> None:
        """Have the gateways refuse new requests, and wait until those in flight are answered."""
        asyncio.run(_drain(timeout_s))


def _channel_key() -> bytes:
    """The secret of this run's data channels, made from the token that this run's Ray asks for."""
    return hmac.digest(os.environ["RAY_AUTH_TOKEN"].encode(), b"halftone data channel", "sha256")


async def _drain(timeout_s: float) -> None:
    hub = serve.get_deployment_handle(HUB_DEPLOYMENT, APP_NAME)
    try:
        async with asyncio.timeout(timeout_s):
            while await hub.drain.remote():  # noqa: ASYNC110  The gateways are other processes.
                await asyncio.sleep(_POLL_INTERVAL_S)
    except TimeoutError:
        return  # The operator's limit: what is still running is cut off.
