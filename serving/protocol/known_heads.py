"""Heads of requests that were parsed before."""

from __future__ import annotations

from dataclasses import dataclass

from serving.protocol.http import Headers

#: Of heads that are remembered: their number, and the size of each.
MAX_KNOWN_HEADS = 256
MAX_KNOWN_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A head that was parsed before, byte for byte, with a body of known size behind it."""

    method: str
    path: str
    query: str
    #: Shared by all requests that begin like this.
    headers: Headers
    body_bytes: int
    keeps_alive: bool
    is_old: bool


class KnownHeads:
    """Heads that clients sent lately: most send the same one again and again."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._heads)

    def get(self, head: bytes) -> KnownHead | None:
        """What it was parsed to; None where it is new."""
        return self._heads.get(head)

    def put(self, head: bytes, known: KnownHead) -> None:
        """Remember one, unless it is large."""
        if len(head) <= MAX_KNOWN_HEAD_BYTES:
            if len(self._heads) >= MAX_KNOWN_HEADS:
                self._heads.clear()  # Clients whose heads differ each time gain nothing by any order.
            self._heads[head] = known
