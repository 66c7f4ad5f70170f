"""A request and a response as the gateway sees them, whatever server carried them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import orjson

from serving.errors import BadHeader, RequestError

#: Echoed in every response, made where the client gave none.
REQUEST_ID_HEADER = "x-request-id"
#: Stands for a header value that arrived but is not text. No valid value contains it,
#: so that the header is refused where its value matters and ignored where it does not.
UNDECODABLE = "\N{REPLACEMENT CHARACTER}"


T = TypeVar("T")
_NOT_LOOKED_FOR = object()


class Headers:
    """Request headers: case-insensitive names, every value of a repeated one kept in order."""

    __slots__ = ("_found", "_values")

    def __init__(
        self, pairs: Iterable[tuple[str, str]] = (), values: dict[str, list[str]] | None = None
    ) -> None:
        """From pairs; `values`, by lower-case name, are kept as they are and the pairs added to them."""
        values = {} if values is None else values
        for name, value in pairs:
            lower = name.lower()
            if lower in values:
                values[lower].append(value)
            else:
                values[lower] = [value]
        self._values = values
        self._found: dict[Callable[[Headers], Any], Any] = {}

    def once(self, find: Callable[[Headers], T]) -> T:
        """What a function of nothing but the headers finds in them, looked for once.

        Requests with the same head share their headers. What it raises is not remembered.
        """
        found = self._found.get(find, _NOT_LOOKED_FOR)
        if found is _NOT_LOOKED_FOR:
            found = self._found[find] = find(self)
        return cast("T", found)

    def get(self, name: str) -> str | None:
        """The first value of a header, or `None` where it is absent."""
        values = self._values.get(name.lower())
        return values[0] if values else None

    def only(self, name: str) -> str | None:
        """The value of a header that may be given once, or `None` where it is absent.

        Raises:
            BadHeader: it is repeated: another program between may read the other value.
        """
        values = self._values.get(name.lower())
        if values is None:
            return None
        if len(values) > 1:
            raise BadHeader(f"{name.title()} is given {len(values)} times; once is enough")
        return values[0]

    def get_all(self, name: str) -> list[str]:
        """Every value of a header, in the order of arrival."""
        return list(self._values.get(name.lower(), ()))

    def items(self) -> list[tuple[str, str]]:
        """All pairs, lower-case names, equal names together."""
        return [(name, value) for name, values in self._values.items() for value in values]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._values

    def __len__(self) -> int:
        """The number of distinct names."""
        return len(self._values)

    def __repr__(self) -> str:
        # Values are left out: a log must not show a token.
        return f"Headers({sorted(self._values)})"


@dataclass(slots=True)
class Request:
    """One complete HTTP request."""

    method: str
    #: Percent-decoded, without the query.
    path: str
    #: As sent, without the question mark.
    query: str = ""
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


@dataclass(slots=True)
class Response:
    """One complete HTTP response. The server adds `content-length` and `date`."""

    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


def error_body(error: RequestError, request_id: str) -> bytes:
    """The JSON that every error is answered with: `error`, `code` and `id`."""
    # Text with lone surrogates is no UTF-8; it can only come from a careless caller.
    sentence, identity = (
        text.encode("utf-8", "replace").decode("utf-8") for text in (str(error), request_id)
    )
    return orjson.dumps({"error": sentence, "code": error.code, "id": identity})
