"""One good request and a seed -> one bad one, always the same.

Most mutations keep the message's frame, so that what is spoiled arrives where it is parsed: JSON values,
text of the JSON, bytes of tensors, headers, paths, chunks. The others spoil bytes of the wire itself.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from loadtests.fuzz.message import Message

#: Where the JSON of a binary body ends.
JSON_LENGTH = b"inference-header-content-length"
#: In JSON, where something else belongs.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 65504,
    65520, "", "x", "fp32", "fp16", "critical", "rel_l2<=1e-3", "FP32", "BYTES", "é\u0000\u2028", [], {},
    [[]], [None], {"": None}, [1, 2, 3], ["a"], {"binary_data_size": 8}, {"name": "x"}, "y" * 300,
    [0] * 300,
)  # fmt: skip
#: Anywhere in a text.
TOKENS: tuple[bytes, ...] = (
    b"NaN", b"-Infinity", b"1e999", b"1e-999", b"-0", b"01", b"0x1", b"9" * 400, b"null", b"true", b'"',
    b"\\", b"\\ud800", b"\\udc00\\ud800", b"\\u0000", b"[", b"]", b"{", b"}", b",", b":", b"[" * 120,
    b"]" * 120, b'{"a":' * 120, b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x00", b"\x80", b"/*", b"//",
    b" " * 2000, b'"inputs":[]', b'"name"', b'"data":[1]', b'"shape":[2]',
    b'"parameters":{"binary_data_size":4}', b'"datatype":"FP32"', b"binary_data_size", b"classification",
    b"shared_memory_region", b"1E5", b"1.",
)  # fmt: skip
#: Parts of what `X-Precision` may say, and of what it may not.
DECLARATION: tuple[bytes, ...] = (
    b"fp32", b"fp16", b"bf16", b"critical", b"bulk", b"rel_l2", b"max_abs", b"ulp", b"cosine", b"<=", b"<",
    b"=", b">=", b" ", b"\t", b"1e-3", b"0", b"-1", b"nan", b"inf", b"1e999", b"1_0", b"0x1p3", b",", b";",
    b'"', b"%0d", b"FP32", b"\xc3\xa9", b"\xff", b"x" * 200, b"",
)  # fmt: skip
NUMBERS: tuple[bytes, ...] = (
    b"", b"0", b"-1", b"+1", b"1", b"01", b"1.5", b"1e3", b"1e-300", b"nan", b"inf",
    b"99999999999999999999", b"9" * 5000, b" 7 ", b"0x10", b"\xd9\xa3", b"1_000", b"4294967296",
    b"9223372036854775807",
)  # fmt: skip
OTHERS: dict[bytes, tuple[bytes, ...]] = {
    JSON_LENGTH: NUMBERS,
    b"x-request-timeout-seconds": NUMBERS,
    b"x-precision-verify": (b"true", b"TRUE", b"1", b"", b"false ", b"\xff"),
    b"x-request-id": (b"", b"a" * 129, b"\x7f", b"\xff", b'"}', b"a b", b"a" * 9000),
    b"content-type": (b"", b"text/plain", b"application/json;charset=utf-16", b"*/*", b"\xff", b"a" * 500),
    b"content-encoding": (b"gzip", b"deflate", b"br", b"", b"gzip, gzip", b"identity", b"GZIP", b"\xff"),
    b"authorization": (b"Bearer x", b"Bearer", b"Basic \xff", b"", b"Bearer " + b"y" * 3000),
    b"traceparent": (b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00", b"00-zz", b"", b"\xff"),
    b"accept": (b"text/html", b"application/openmetrics-text", b"*/*;q=0", b"\xff"),
    b"expect": (b"100-continue", b"200-ok"),
    b"connection": (b"close", b"upgrade", b"keep-alive, close"),
    b"upgrade": (b"websocket", b"h2c"),
    b"range": (b"bytes=0-1",),
    b"host": (b"", b"a" * 300, b"\xff"),
}  # fmt: skip
METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"TRACE",
    b"PATCH",
    b"PRI",
    b"post",
    b"X" * 40,
)
PATH_PARTS = (
    b"/", b"//", b"..", b"%2e%2e", b"%2f", b"%00", b"%ff", b"%", b"%zz", b"?", b"?a=b", b"#", b"\xff",
    b"v2", b"models", b"echo", b"typed", b"nobody", b"infer", b"versions", b"1", b"2", b"tiers", b"fp16",
    b"trip", b"reset", b"x" * 3000, b"console", b"-", b"healthz", b";", b"*", b"http://a/",
)  # fmt: skip

Mutation = Callable[[Message, random.Random], Message]
_MOST_NODES = 60
_BOMBS = {b"gzip": gzip.compress(b" " * 3_000_000), b"deflate": zlib.compress(b" " * 3_000_000)}


@dataclass(frozen=True, slots=True)
class Sent:
    """What goes over the wire.

    Attributes:
        is_framed: the server knows where it ends, and the connection may carry another.
        message: None where bytes of the wire were spoiled.
    """

    wire: bytes
    is_framed: bool
    message: Message | None


def mutated(number: int, seed: int, beginnings: Sequence[Message]) -> Sent:
    """The request of that number; equal arguments give the same one."""
    source = random.Random(f"{seed}:{number}")  # noqa: S311  Repeatable, not secret.
    message = source.choice(beginnings)
    for _ in range(source.choice((0, 1, 1, 1, 2, 2, 3))):
        mutation = source.choice(HEADS if not message.body else BODIES + HEADS)
        message = mutation(message, source)
    wire = message.wire()
    if source.random() < 0.04:  # noqa: PLR2004  Such a request takes the server's patience, and ours.
        return Sent(spoil_bytes(wire, source), False, None)
    head = wire[: len(wire) - len(message.body)] if message.chunks_bytes is None else b""
    told = {name for name, _ in message.headers}
    return Sent(wire, b"\x00" not in head and not told & {b"expect", b"connection", b"upgrade"}, message)


def spoil_bytes(text: bytes, source: random.Random) -> bytes:
    """Bytes replaced, inserted, removed, repeated, cut off."""
    for _ in range(source.choice((1, 1, 2, 4))):
        start = source.randrange(len(text) + 1)
        stop = min(len(text), start + source.choice((0, 1, 1, 2, 8, 64)))
        piece = source.choice(
            (b"", source.randbytes(source.choice((1, 2, 4))), source.choice(TOKENS), text[start:stop] * 2)
        )
        text = text[:start] + piece + text[stop:]
        if source.random() < 0.1:  # noqa: PLR2004
            text = text[: source.randrange(len(text) + 1)]
    return text


def spoil_body(message: Message, source: random.Random) -> Message:
    """Bytes anywhere in it."""
    return replace(message, body=spoil_bytes(message.body, source))


def spoil_text(message: Message, source: random.Random) -> Message:
    """Bytes of the JSON, whose length is told as it is."""
    text, tail = parts_of(message)
    return _with_parts(message, spoil_bytes(text, source), tail)


def spoil_tail(message: Message, source: random.Random) -> Message:
    """Bytes of the tensors behind the JSON."""
    text, tail = parts_of(message)
    return _with_parts(message, text, spoil_bytes(tail, source))


def spoil_values(message: Message, source: random.Random) -> Message:
    """Values of the JSON replaced, removed, added or doubled; still JSON."""
    text, tail = parts_of(message)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return spoil_text(message, source)
    for _ in range(source.choice((1, 1, 2))):
        document = _edited(document, source)
    return _with_parts(message, json.dumps(document).encode(), tail)


def _edited(document: Any, source: random.Random) -> Any:
    nodes: list[tuple[Any, Any]] = []
    _collect(document, nodes)
    if not nodes:
        return deepcopy(source.choice(VALUES))
    holder, key = source.choice(nodes)
    value = deepcopy(source.choice((*VALUES, holder[key])))
    action = source.randrange(4)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder.insert(key, value)
    elif action == 1:
        holder[source.choice(("name", "data", "shape", "id", "outputs", "precision", "timeout", "z"))] = value
    else:
        holder[key] = value
    return document


def _collect(node: Any, found: list[tuple[Any, Any]]) -> None:
    """Holders and keys; of long arrays the first few elements."""
    keys = (
        list(node) if isinstance(node, dict) else range(min(len(node), 3)) if isinstance(node, list) else []
    )
    for key in keys:
        if len(found) < _MOST_NODES:
            found.append((node, key))
            _collect(node[key], found)


def compress(message: Message, source: random.Random) -> Message:
    """As it should be, or not quite."""
    encoding, pack = source.choice(((b"gzip", gzip.compress), (b"deflate", zlib.compress)))
    packed = source.choice((pack(message.body), pack(message.body * 2), _BOMBS[encoding]))
    body = source.choice((packed, packed, packed[:-3], packed + packed, packed + b"x", message.body))
    return replace(message.with_header(b"content-encoding", encoding), body=body)


def chunk(message: Message, source: random.Random) -> Message:
    """In pieces of any size."""
    return replace(message, chunks_bytes=tuple(source.choices((1, 2, 7, 100, 4096, 70_000), k=5)))


def declare(message: Message, source: random.Random) -> Message:
    """Another precision, or none that is any."""
    value = b"".join(source.choices(DECLARATION, k=source.choice((1, 1, 2, 3, 3, 4))))
    if source.random() < 0.1:  # noqa: PLR2004
        return replace(message, headers=(*message.headers, (b"x-precision", value)))
    return message.with_header(b"x-precision", value)


def set_header(message: Message, source: random.Random) -> Message:
    """Another header's value, or the same header once more."""
    name = source.choice(tuple(OTHERS))
    value = source.choice(OTHERS[name])
    if source.random() < 0.1:  # noqa: PLR2004
        return replace(message, headers=(*message.headers, (name, value)))
    return message.with_header(name, value)


def drop_header(message: Message, source: random.Random) -> Message:
    """One is missing."""
    return message.with_header(source.choice(message.headers)[0], None) if message.headers else message


def add_headers(message: Message, source: random.Random) -> Message:
    """Of names that nobody knows."""
    count = source.choice((1, 20, 90))
    made = tuple((b"x-fuzz-%d" % source.randrange(10**6), source.choice(TOKENS)) for _ in range(count))
    printable = tuple(pair for pair in made if b"\x00" not in pair[1])
    return replace(message, headers=message.headers + printable)


def change_path(message: Message, source: random.Random) -> Message:
    """Parts replaced, inserted, removed."""
    pieces = message.target.split(b"/")
    at = source.randrange(len(pieces))
    pieces[at : at + source.choice((0, 1, 1))] = source.choices(PATH_PARTS, k=source.choice((0, 1, 1, 2)))
    return replace(message, target=b"/".join(pieces) or b"/")


def change_method(message: Message, source: random.Random) -> Message:
    """Of another route, or of none."""
    return replace(message, method=source.choice(METHODS))


BODIES: tuple[Mutation, ...] = (
    spoil_body, spoil_text, spoil_text, spoil_text, spoil_tail, spoil_tail, spoil_values, spoil_values,
    spoil_values, spoil_values, compress, chunk,
)  # fmt: skip
HEADS: tuple[Mutation, ...] = (
    declare, declare, set_header, set_header, drop_header, add_headers, change_path, change_method,
)  # fmt: skip


def parts_of(message: Message) -> tuple[bytes, bytes]:
    """The JSON, and the tensors behind it."""
    told = message.header(JSON_LENGTH)
    length = int(told) if told is not None and told.isdigit() and len(told) < 10 else len(message.body)  # noqa: PLR2004
    return message.body[:length], message.body[length:]


def _with_parts(message: Message, text: bytes, tail: bytes) -> Message:
    if message.header(JSON_LENGTH) is not None:
        message = message.with_header(JSON_LENGTH, b"%d" % len(text))
    return replace(message, body=text + tail)
