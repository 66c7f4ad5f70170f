"""Good requests to begin from: every route, JSON and binary bodies, each way to declare a precision."""

from __future__ import annotations

import json
import struct
from typing import Any

from loadtests.fuzz.message import Message
from loadtests.fuzz.typed_model import Typed
from serving.models.echo import Echo
from serving.tensors import Array, Tensors

HOST = (b"host", b"fuzz")
JSON = (b"content-type", b"application/json")
BINARY = (b"content-type", b"application/octet-stream")
DECLARED = (b"fp32", b"critical", b"fp16", b"bulk", b"rel_l2<=1e-3", b"max_abs <= 0.5")
READS = (
    b"/v2",
    b"/v2/health/ready",
    b"/v2/health/live",
    b"/v2/models/echo",
    b"/v2/models/echo/ready",
    b"/v2/models/echo/config",
    b"/v2/models/echo/stats",
    b"/v2/models/echo/example",
    b"/v2/models/echo/precision",
    b"/v2/models/typed/versions/1",
    b"/metrics",
    b"/openapi.json",
    b"/console/console.js",
    b"/",
)
ECHO_PATH, TYPED_PATH = b"/v2/models/echo/infer", b"/v2/models/typed/infer"


def seeds() -> list[Message]:
    """All of them; most are inferences."""
    echo = {name: array[:2] for name, array in Echo().examples().items()}
    typed = Typed().examples()
    head: dict[str, Any] = {"id": "fuzz-1", "parameters": {"precision": "critical", "timeout": 5_000_000}}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    found = [
        inference(ECHO_PATH, echo, ()),
        inference(ECHO_PATH, echo, (), {**head, "outputs": [{"name": "y"}]}),
        inference(ECHO_PATH, echo, ("x",)),
        inference(ECHO_PATH, echo, ("x",), {"outputs": outputs}),
        inference(TYPED_PATH, typed, tuple(typed), head),
        inference(TYPED_PATH, typed, tuple(typed), {"parameters": {"binary_data_output": True}}),
        inference(TYPED_PATH, typed, ("half",)),
        inference(TYPED_PATH, typed, ("half", "text"), head),
    ]
    declaring = [
        found[index].with_header(b"x-precision", value)
        for index, value in zip((0, 2, 0, 2, 0, 2), DECLARED, strict=True)
    ]
    declaring.append(found[0].with_header(b"x-precision-verify", b"true"))
    declaring.append(found[2].with_header(b"x-request-timeout-seconds", b"5"))
    reads = [Message(b"GET", path, (HOST,)) for path in READS]
    reason = json.dumps({"reason": "fuzz"}).encode()
    reads.append(Message(b"POST", b"/v2/repository/index", (HOST, JSON), b"{}"))
    reads.append(Message(b"POST", b"/v2/models/echo/tiers/fp16/reset", (HOST, JSON), reason))
    return found * 3 + declaring * 2 + reads


def inference(
    path: bytes, tensors: Tensors, in_binary: tuple[str, ...], head: dict[str, Any] | None = None
) -> Message:
    """A request whose tensors go in JSON, but for those that are named."""
    described, tail = [], b""
    for name, array in tensors.items():
        entry: dict[str, Any] = {"name": name, "datatype": _DATATYPES[array.dtype.kind, array.itemsize]}
        entry["shape"] = list(array.shape)
        if name in in_binary:
            raw = _raw(array)
            tail += raw
            entry["parameters"] = {"binary_data_size": len(raw)}
        else:
            values = array.ravel().tolist()
            entry["data"] = [value.decode() if isinstance(value, bytes) else value for value in values]
        described.append(entry)
    text = json.dumps({**(head or {}), "inputs": described}).encode()
    if not in_binary:
        return Message(b"POST", path, (HOST, JSON), text)
    length = (b"inference-header-content-length", b"%d" % len(text))
    return Message(b"POST", path, (HOST, BINARY, length), text + tail)


_DATATYPES = {
    ("O", 8): "BYTES",
    ("b", 1): "BOOL",
    ("i", 8): "INT64",
    ("f", 2): "FP16",
    ("f", 4): "FP32",
}


def _raw(array: Array) -> bytes:
    if array.dtype.kind == "O":
        return b"".join(struct.pack("<I", len(text)) + text for text in array.ravel())
    return array.tobytes()
