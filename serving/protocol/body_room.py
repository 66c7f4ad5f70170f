"""The memory that there is for the bodies of all requests together."""

from __future__ import annotations


class BodyRoom:
    """What the bodies of all connections together may hold, in bytes.

    A body that has it to itself is bounded by the limit of one body alone.
    """

    __slots__ = ("_limit_bytes", "held_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        #: Of bodies that arrive, or whose requests are not answered yet.
        self.held_bytes = 0

    def take(self, size_bytes: int, own_bytes: int) -> bool:
        """Reserve more for a body that holds `own_bytes`, if there is room."""
        if self.held_bytes > own_bytes and self.held_bytes + size_bytes > self._limit_bytes:
            return False
        self.held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give back."""
        self.held_bytes -= size_bytes
