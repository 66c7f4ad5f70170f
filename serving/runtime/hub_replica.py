"""The hub's replica: merges the gateways' metrics, and tells them to drain."""

from __future__ import annotations

from dataclasses import dataclass

from serving.observe.hub import Family, Hub, Snapshot


@dataclass(frozen=True, slots=True)
class Beat:
    """What a gateway pushes every second."""

    process: str
    snapshot: Snapshot
    inflight_requests: int
    #: Whether it refuses new requests already.
    draining: bool


class HubReplica:
    """One per application, on any node."""

    def __init__(self) -> None:
        self._hub = Hub()
        self._gateways: dict[str, Beat] = {}
        self._draining = False

    async def push(self, beat: Beat) -> bool:
        """Take a gateway's figures. Returns whether the gateway shall drain."""
        self._hub.push(beat.process, beat.snapshot)
        self._gateways[beat.process] = beat
        return self._draining

    async def push_and_render(self, beat: Beat, openmetrics: bool) -> bytes:
        """Take a gateway's figures and return the page of all."""
        await self.push(beat)
        return self._hub.render(openmetrics)

    async def push_and_merge(self, beat: Beat) -> list[Family]:
        """Take a gateway's figures and return the families of all."""
        await self.push(beat)
        return self._hub.merged()

    async def drain(self) -> int:
        """Tell gateways to drain. Returns how many have not finished yet."""
        self._draining = True
        return sum(
            1
            for process, beat in self._gateways.items()
            if self._hub.is_alive(process) and (beat.inflight_requests or not beat.draining)
        )
