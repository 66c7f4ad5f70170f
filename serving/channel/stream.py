"""One connection of a channel: first the handshake, then frames."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod

from serving.channel.frames import Frame, FrameError, FrameReader
from serving.channel.handshake import HANDSHAKE_TIMEOUT_S, HandshakeError

logger = logging.getLogger("halftone.channel")


class FrameStream(asyncio.Protocol):
    """What both ends have in common. The subclass says how its end shakes hands."""

    def __init__(self, handshake_bytes: int) -> None:
        """`handshake_bytes`: of the first message that the peer sends."""
        self._transport: asyncio.WriteTransport | None = None
        self._handshake = bytearray()
        self._handshake_bytes = handshake_bytes
        self._reader: FrameReader | None = None
        self._limit: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether the peer has proved itself and frames may pass."""
        return self._reader is not None and self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands; the handshake begins."""
        self._transport = transport  # type: ignore[assignment]  # A stream's transport writes.
        self._limit = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._too_late)
        self.greet()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._transport = None
        if self._limit is not None:
            self._limit.cancel()
        self.lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        try:
            if self._reader is None:
                data = self._shake_hands(data)
            if self._reader is not None:
                for frame in self._reader.feed(data):
                    self.received(frame)
        except (HandshakeError, FrameError) as error:
            logger.warning("a channel is closed: %s", error)
            self.close()

    def _shake_hands(self, data: bytes) -> bytes:
        """Take what belongs to the handshake; returns what is behind it."""
        while len(self._handshake) + len(data) >= self._handshake_bytes and self._reader is None:
            taken = self._handshake_bytes - len(self._handshake)
            message, data = bytes(self._handshake) + data[:taken], data[taken:]
            self._handshake.clear()
            self._handshake_bytes = self.shake_hands(message)
            if self._handshake_bytes == 0:
                self._reader = FrameReader()
                if self._limit is not None:
                    self._limit.cancel()
                self.opened()
                return data
        self._handshake += data
        return b""

    def _too_late(self) -> None:
        logger.warning("a channel is closed: no handshake within %g s", HANDSHAKE_TIMEOUT_S)
        self.close()

    def write(self, pieces: list[bytes | memoryview]) -> None:
        """Send a frame. One that is lost with the connection is lost."""
        if self._transport is not None:
            self._transport.writelines(pieces)

    def close(self) -> None:
        """Close the connection at once; `lost` follows."""
        if self._transport is not None:
            self._transport.abort()

    @abstractmethod
    def greet(self) -> None:
        """Say what this end says first, if anything."""

    @abstractmethod
    def shake_hands(self, message: bytes) -> int:
        """Answer a message of the handshake. Returns how long the next one is; 0: it is done.

        Raises:
            HandshakeError: the peer failed it.
        """

    @abstractmethod
    def opened(self) -> None:
        """Frames may pass now."""

    @abstractmethod
    def received(self, frame: Frame) -> None:
        """A frame has come."""

    @abstractmethod
    def lost(self, error: Exception | None) -> None:
        """The connection is gone."""
