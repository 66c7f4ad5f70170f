"""What a gateway keeps of the hub, so that the totals of dead processes outlive the hub's own process."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle

from serving.runtime.hub_replica import Orders


class HubMemory:
    """The past of the hub that this gateway met last, to be handed to the next one."""

    def __init__(self, hub: DeploymentHandle) -> None:
        self._past = hub.options(method_name="past")
        self._restore = hub.options(method_name="restore")
        #: The name of the hub whose past is kept.
        self.hub: str | None = None
        self._version = 0
        self._kept = b""

    async def keep(self, process: str, orders: Orders) -> None:
        """Fetch what the hub wants kept, if it changed; hand a new hub what the last one wanted kept."""
        if (orders.hub, orders.past_version) == (self.hub, self._version):
            return
        if self.hub not in {None, orders.hub}:
            await self._restore.remote(process, self._kept)
        self._kept = await self._past.remote(process)
        self.hub, self._version = orders.hub, orders.past_version
