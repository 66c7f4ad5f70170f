"""What is sent, and what may come back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

_TIER = re.compile(rb"\r\nx-precision-tier: *([^\r]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One kind of request, ready to be written to a socket.

    Attributes:
        wire: head and body of the HTTP/1.1 request.
        tiers: those that may answer it, by the reply's `X-Precision-Tier`; None: nothing is checked.
        label: for reports.
    """

    wire: bytes
    tiers: frozenset[bytes] | None = None
    label: str = ""

    @classmethod
    def post(
        cls,
        url: str,
        body: bytes,
        headers: dict[str, str],
        tiers: frozenset[bytes] | None = None,
        label: str = "",
    ) -> Exchange:
        """A POST over a connection that stays open."""
        parts = urlsplit(url)
        head = {"host": parts.netloc, "content-length": str(len(body)), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        return cls(f"POST {parts.path or '/'} HTTP/1.1\r\n{lines}\r\n".encode() + body, tiers, label)

    def accepts(self, head: bytes) -> bool:
        """Whether the tier that the reply's head names may answer this request."""
        if self.tiers is None:
            return True
        tier = _TIER.search(head)
        return tier is not None and tier[1] in self.tiers


@dataclass(frozen=True, slots=True)
class Mix:
    """Exchanges and how often each is drawn.

    Raises:
        ValueError: there is none, or the weights do not match.
    """

    exchanges: tuple[Exchange, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.exchanges or (self.weights is not None and len(self.weights) != len(self.exchanges)):
            raise ValueError("a mix has at least one exchange, and a weight for each or for none")

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Indices into `exchanges`."""
        if self.weights is None:
            return random.integers(len(self.exchanges), size=count)
        weights = np.asarray(self.weights)
        return random.choice(len(self.exchanges), size=count, p=weights / weights.sum())
