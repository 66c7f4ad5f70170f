"""What is wrong with an answer, whatever was asked."""

from __future__ import annotations

import json
from typing import Any

from loadtests.fuzz.client import Reply
from loadtests.fuzz.mutations import Sent

_INTERNALS = ("Traceback", "site-packages", 'File "', "0x7f", "\\x1b")
_SENSITIVE = (b"critical", b"fp32")


def fault(sent: Sent, reply: Reply) -> str | None:
    """A sentence, or None where all is as documented."""
    method = sent.wire.partition(b" ")[0]
    if reply.status >= 500:  # noqa: PLR2004
        intended = reply.status == 504 and b"timeout" in sent.wire.lower()  # noqa: PLR2004
        if not intended:
            return f"status {reply.status}: {reply.body[:300]!r}"
    if method == b"HEAD":
        return None
    if reply.status >= 400:  # noqa: PLR2004
        return _error_fault(reply)
    return _success_fault(sent, reply)


def _error_fault(reply: Reply) -> str | None:
    if not reply.body:
        return f"status {reply.status} without a body"
    document = _strict_json(reply.body)
    if not isinstance(document, dict) or set(document) != {"error", "code", "id"}:
        return f"an error of another shape: {reply.body[:300]!r}"
    if document["id"] != reply.headers.get("x-request-id"):
        return f"the id in the error is not the reply's: {document['id']!r}"
    if any(word in document["error"] for word in _INTERNALS):
        return f"internals in an error: {document['error']!r}"
    return None


def _success_fault(sent: Sent, reply: Reply) -> str | None:
    kind = reply.headers.get("content-type", "")
    if kind == "application/json":
        if _strict_json(reply.body) is None:
            return f"no JSON: {reply.body[:300]!r}"
    elif kind == "application/octet-stream":
        length = int(reply.headers.get("inference-header-content-length", "-1"))
        if not 0 < length <= len(reply.body) or _strict_json(reply.body[:length]) is None:
            return f"no JSON before the tensors: {reply.body[:300]!r}"
    return _precision_fault(sent, reply)


def _precision_fault(sent: Sent, reply: Reply) -> str | None:
    tier = reply.headers.get("x-precision-tier")
    if sent.message is None or tier is None or tier == "fp32":
        return None
    declared = [value.strip() for name, value in sent.message.headers if name == b"x-precision"]
    if any(value in _SENSITIVE for value in declared):
        return f"{declared} was answered by {tier}"
    return None


def _strict_json(text: bytes) -> Any:
    """None where it is no JSON, or holds what JSON has no word for."""
    try:
        return json.loads(text.decode(), parse_constant=_refuse)
    except ValueError:
        return None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
