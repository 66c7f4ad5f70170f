"""What answers requests, and the bounds that all connections of a server share."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from serving.errors import BodyTimeout, InternalError, RequestError
from serving.protocol.body_room import BodyRoom
from serving.protocol.http import Headers, Request, Response
from serving.protocol.known_heads import KnownHeads
from serving.protocol.request_reader import MAX_BODY_CHUNKS, ReadLimits, RequestReader

Handle = Callable[[Request], Awaitable[Response]]
#: Makes (and counts) the response to an error. The headers are `None` where none could be read.
Refuse = Callable[[RequestError, Headers | None], Response]

#: Of all bodies together: eight of the default limit.
MAX_HELD_BYTES = 536_870_912

_log = logging.getLogger(__name__)


class HttpApp:
    """`handle`, and what every connection has to keep to."""

    def __init__(
        self,
        handle: Handle,
        *,
        refuse: Refuse,
        max_body_bytes: int,
        max_held_bytes: int = MAX_HELD_BYTES,
        body_timeout_s: float = 10.0,
        max_body_chunks: int = MAX_BODY_CHUNKS,
    ) -> None:
        """Make the application.

        Args:
            handle: Answers a complete request. It is cancelled when its client goes away.
            refuse: Answers an error that happens before `handle` runs, or in it.
            max_body_bytes: What a body may hold, as received.
            max_held_bytes: What the bodies of all requests together may hold. One that has it to itself is
                bounded by `max_body_bytes` alone.
            body_timeout_s: How long a body may take to arrive.
            max_body_chunks: Into how many chunks a body of unknown length may be split.
        """
        self._handle = handle
        self._refuse = refuse
        self._limits = ReadLimits(max_body_bytes, max_body_chunks)
        self._body_timeout_s = body_timeout_s
        self._heads = KnownHeads()
        self.room = BodyRoom(max_held_bytes)

    @property
    def max_body_bytes(self) -> int:
        """What a body may hold, as received."""
        return self._limits.max_body_bytes

    @property
    def body_timeout_s(self) -> float:
        """How long a body may take to arrive."""
        return self._body_timeout_s

    def reader(self) -> RequestReader:
        """For a new connection."""
        return RequestReader(self._limits, self.room, self._heads)

    async def answer(self, request: Request) -> Response:
        """The response to a request, whatever happens in `handle`. Raises only when it is cancelled."""
        try:
            return await self._handle(request)
        except RequestError as error:
            return self._refuse(error, request.headers)
        except Exception:
            _log.exception("unhandled error while answering a request")
            return self.broken(request.headers)

    def broken(self, headers: Headers | None = None) -> Response:
        """The response where there should have been another one."""
        return self._refuse(InternalError("internal error"), headers)

    def late(self, headers: Headers | None) -> Response:
        """The response to a request whose body does not arrive."""
        return self.refusal(
            BodyTimeout(f"the body did not arrive within {self._body_timeout_s:g} s"), headers
        )

    def refusal(self, error: RequestError, headers: Headers | None = None) -> Response:
        """The response, counted, to a request that was not read to its end."""
        return self._refuse(error, headers)
