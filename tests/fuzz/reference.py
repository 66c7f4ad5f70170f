"""What an inference request says, read the plainest way: for requests that the server accepted."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from serving.tensors import Array, Signature, Tensors, TensorSpec


def reference_inputs(body: bytes, json_length: int | None, signature: Signature) -> Tensors:
    """The tensors, with Python's own JSON and nothing of Halftone's but its table of dtypes."""
    text, tail = (body, b"") if json_length is None else (body[:json_length], body[json_length:])
    found: Tensors = {}
    for entry in json.loads(text)["inputs"]:
        spec = signature.input(entry["name"])
        assert spec is not None
        size = (entry.get("parameters") or {}).get("binary_data_size")
        if size is None:
            array = _of_elements(_flat(entry["data"]), spec)
        else:
            array, tail = _of_bytes(tail[:size], spec), tail[size:]
        found[spec.name] = array.reshape(entry["shape"])
    assert not tail
    return {spec.name: found[spec.name] for spec in signature.inputs}


def _flat(data: Any) -> list[Any]:
    while data and isinstance(data[0], list):
        data = list(chain.from_iterable(data))
    return list(data)


def _of_elements(elements: list[Any], spec: TensorSpec) -> Array:
    if spec.dtype == "BYTES":
        array = np.empty(len(elements), object)
        array[:] = [element.encode() for element in elements]
        return array
    assert all(type(element) in _ALLOWED[spec.numpy_dtype.kind] for element in elements)
    return np.array(elements, np.float64 if spec.numpy_dtype.kind == "f" else None).astype(spec.numpy_dtype)


_ALLOWED = {"f": (int, float), "i": (int,), "u": (int,), "b": (bool,)}


def _of_bytes(raw: bytes, spec: TensorSpec) -> Array:
    if spec.dtype != "BYTES":
        return np.frombuffer(raw, spec.numpy_dtype)
    elements = list(_strings(raw))
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def _strings(raw: bytes) -> Iterator[bytes]:
    while raw:
        (length,) = struct.unpack("<I", raw[:4])
        yield raw[4 : 4 + length]
        raw = raw[4 + length :]
