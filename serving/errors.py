"""Every error that Halftone raises on purpose, and the HTTP status each one becomes.

::

    HalftoneError
    ├── ConfigError                    refused before anything starts; exit status 2
    └── RequestError                   answered as JSON; `status` and `code` are class attributes
        ├── BadJson            400     the body is no UTF-8 JSON, or not of the protocol's form
        ├── TooDeep            400     JSON nested beyond 100 levels
        ├── NonfiniteInput     400     NaN or infinity, or a number beyond the dtype's range
        ├── BadType            400     wrong dtype, or a value of another type
        ├── BadShape           400     shape and data disagree, or the shape is not the signature's
        ├── BadTensor          400     a tensor is missing, unknown or given twice
        ├── BadPrecision       400     the declared precision is empty, repeated or unknown
        ├── BadHeader          400     another header or parameter has no valid value
        ├── BadRequest         400     what was sent is no HTTP/1.1
        ├── Unauthorized       401     no token, or an unknown one
        ├── UnknownRoute       404
        ├── UnknownModel       404
        ├── MethodNotAllowed   405
        ├── BodyTimeout        408     the body did not arrive in time
        ├── PrecisionUnavailable 409   the tier exists but cannot be honoured here
        ├── TooLarge           413     body, decompressed body or rows over the limit
        ├── UrlTooLong         414
        ├── UnsupportedMedia   415     content type or encoding that is not served
        ├── NonfiniteOutput    422     the model's answer is not finite
        ├── Quarantined        422     the row ended the processes that computed it
        ├── HeadTooLarge       431     too many headers, or too large
        ├── ModelError         500     the model's own code raised, or broke its signature
        ├── InternalError      500     a fault of Halftone's own
        ├── Overloaded         503     the tier's queue is full
        ├── TooManyConnections 503     the gateway has no room for another connection
        ├── NotReady           503     a tier is loading, draining or failed to start
        ├── DeviceOutOfMemory  503     the batch did not fit in the device's memory
        ├── DeviceLost         503     the device failed: its replica takes no more work
        ├── TierLost           503     the replica died with the batch, twice
        └── Deadline           504     the request's time ran out, queued or running

The class *is* the table from error to status: a layer raises one of these and
only `serving.gateway.service` turns it into a response.
"""

from __future__ import annotations

from typing import Any, ClassVar


class HalftoneError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(HalftoneError):
    """The configuration is refused. `path` names the field, as in `models[0].tiers.fp16`."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class RequestError(HalftoneError):
    """A request that gets an error response.

    The message is sent to the client: it holds no internals, and client text in it
    is quoted through `quote`.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    #: Extra response headers, such as `Allow` or `Retry-After`.
    headers: tuple[tuple[str, str], ...] = ()

    def copy(self) -> RequestError:
        """The same error as a new instance, for another request of the batch."""
        return _restored(type(self), self.args, self.headers)

    def __reduce__(self) -> tuple[Any, ...]:
        # Not through __init__: some errors take more than the message.
        return _restored, (type(self), self.args, self.headers)


def _restored(
    kind: type[RequestError], arguments: tuple[Any, ...], headers: tuple[tuple[str, str], ...]
) -> RequestError:
    error = kind.__new__(kind)
    error.args = arguments
    error.headers = headers
    return error


class BadJson(RequestError):
    """The body is not UTF-8 JSON, or not of the protocol's form."""

    status, code = 400, "bad_json"


class TooDeep(RequestError):
    """JSON nested too deeply."""

    status, code = 400, "too_deep"


class NonfiniteInput(RequestError):
    """An input holds NaN or infinity, or a number that its dtype cannot hold."""

    status, code = 400, "nonfinite_input"


class BadType(RequestError):
    """An input's dtype is not the signature's, or a value has another type."""

    status, code = 400, "bad_type"


class BadShape(RequestError):
    """An input's shape is not the signature's, or disagrees with its data."""

    status, code = 400, "bad_shape"


class BadTensor(RequestError):
    """A tensor is missing, unknown or given twice."""

    status, code = 400, "bad_tensor"


class BadPrecision(RequestError):
    """The declared precision is empty, repeated, contradictory or unknown."""

    status, code = 400, "bad_precision"


class BadHeader(RequestError):
    """A header or parameter other than the precision has no valid value."""

    status, code = 400, "bad_header"


class BadRequest(RequestError):
    """What was sent is no HTTP/1.1, or could be read in two ways."""

    status, code = 400, "bad_request"


class Unauthorized(RequestError):
    """The request carries no token, or an unknown one."""

    status, code = 401, "unauthorized"
    headers = (("www-authenticate", "Bearer"),)


class UnknownRoute(RequestError):
    """No such route."""

    status, code = 404, "unknown_route"


class UnknownModel(RequestError):
    """No such model, or no such version of it."""

    status, code = 404, "unknown_model"


class MethodNotAllowed(RequestError):
    """The route exists for another method."""

    status, code = 405, "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.headers = (("allow", allow),)


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    status, code = 408, "body_timeout"


class PrecisionUnavailable(RequestError):
    """The declared tier exists but cannot be honoured on this device."""

    status, code = 409, "precision_unavailable"


class TooLarge(RequestError):
    """The body, what it decompresses to, or its number of rows is over the limit."""

    status, code = 413, "too_large"


class UrlTooLong(RequestError):
    """The request's target is over the limit."""

    status, code = 414, "url_too_long"


class UnsupportedMedia(RequestError):
    """The content type or content encoding is not served."""

    status, code = 415, "unsupported_media_type"


class NonfiniteOutput(RequestError):
    """The model's answer to this request holds NaN or infinity."""

    status, code = 422, "nonfinite_output"


class Quarantined(RequestError):
    """A row of the request ended the processes that computed it, and is not computed for a while."""

    status, code = 422, "quarantined"


class HeadTooLarge(RequestError):
    """The request has too many headers, or they are too large."""

    status, code = 431, "head_too_large"


class ModelError(RequestError):
    """The model's own code raised, or its outputs are not those of its signature."""

    status, code = 500, "model_error"


class InternalError(RequestError):
    """A fault of Halftone's own; the details are in the log under the request id."""

    status, code = 500, "internal"


class Overloaded(RequestError):
    """The tier's queue is full. `retry_after_s` is computed from its drain rate."""

    status, code = 503, "overloaded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.headers = (("retry-after", str(retry_after_s)),)


class TooManyConnections(RequestError):
    """The gateway has as many connections open as it may."""

    status, code = 503, "too_many_connections"
    headers = (("retry-after", "1"),)


class NotReady(RequestError):
    """The tier is loading, draining, or failed to start."""

    status, code = 503, "not_ready"
    headers = (("retry-after", "1"),)


class TierLost(RequestError):
    """The replica that ran the batch died, and so did the retry."""

    status, code = 503, "tier_lost"
    #: Calls with the batch that were lost with their replica: the batch may be why.
    calls_lost: int = 0
    #: Replicas that are known to have ended while they had the batch.
    replicas_lost: int = 0
    headers = (("retry-after", "1"),)


class DeviceLost(RequestError):
    """The device failed: nothing that it returns can be trusted, and it refuses further work.

    The replica must be replaced; the batch may be retried on another.
    """

    status, code = 503, "device_lost"
    headers = (("retry-after", "1"),)


class DeviceOutOfMemory(RequestError):
    """The batch did not fit in the device's memory; a smaller one may."""

    status, code = 503, "device_oom"
    headers = (("retry-after", "1"),)


class Deadline(RequestError):
    """The request's time ran out."""

    status, code = 504, "deadline"


def quote(text: str, limit: int = 64) -> str:
    """Client text as it may stand in a message or a log line: ASCII, escaped, short.

    At most `limit` characters of it, escapes counted, between quotes.
    """
    escaped = ascii(text[: limit + 1])
    if len(escaped) <= limit + 2:
        return escaped
    mark = escaped[0]
    return f"{escaped[: limit - 2]}...{mark}"
