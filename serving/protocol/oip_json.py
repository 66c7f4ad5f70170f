"""Tensor elements in JSON: typed decoding, row-major, flat or nested as the shape says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from serving.errors import BadJson, BadShape, BadType, InternalError, NonfiniteInput, RequestError, quote
from serving.tensors import Array, TensorSpec, element_count

#: Numbers are parsed in pieces of this size: a Python float takes 32 bytes, its text perhaps 2.
_PIECE_BYTES = 1 << 20
_OPENING = re.compile(rb"(?:[ \t\r\n]*\[)*")
_NOT_SKELETON = bytes(set(range(256)) - set(b"[],"))
_BRACKETS = b"[]"

#: numpy's kind of dtype -> what its elements are in JSON.
_ELEMENTS: dict[str, type[Any]] = {"b": bool, "i": int, "u": int, "f": float, "O": str}


def decode_elements(raw: msgspec.Raw, spec: TensorSpec, shape: Sequence[int]) -> Array:
    """An input's `data` as an array of `shape`.

    Args:
        raw: The elements, valid JSON; an array that is flat or nested like `shape`.
        spec: The input's signature.
        shape: The shape that the request states, already held against the signature.

    Raises:
        BadType: An element is not of the dtype, or the dtype cannot be sent in JSON.
        BadShape: The nesting or the number of elements is not the shape's.
        NonfiniteInput: A number is beyond the dtype's range.
    """
    if spec.dtype == "FP16":
        raise BadType(f"input {quote(spec.name)}: FP16 is sent in binary only")
    text = bytes(raw)
    opening = _OPENING.match(text)
    depth = opening[0].count(b"[") if opening else 0
    if depth not in (1, len(shape)):
        raise BadShape(
            f"input {quote(spec.name)}: data must be an array, flat or nested {len(shape)} levels deep"
        )
    kind = spec.numpy_dtype.kind
    try:
        if len(text) > _PIECE_BYTES and kind != "O":
            array = _decode_in_pieces(text, depth, spec, shape)
        else:
            array = _decode_at_once(text, depth, spec, shape)
    except msgspec.ValidationError as error:
        raise _element_error(spec, str(error)) from None
    except msgspec.DecodeError as error:
        raise BadJson(f"input {quote(spec.name)}: {error}") from None
    if kind == "f" and not np.isfinite(array).all():
        raise NonfiniteInput(f"input {quote(spec.name)}: a number is beyond the range of {spec.dtype}")
    return array.reshape(shape)


@cache
def _decoder(kind: str, depth: int) -> msgspec.json.Decoder[Any]:
    nested: Any = _ELEMENTS[kind]
    for _ in range(depth):
        nested = list[nested]
    return msgspec.json.Decoder(nested)


def _decode_at_once(text: bytes, depth: int, spec: TensorSpec, shape: Sequence[int]) -> Array:
    elements: list[Any] = _decoder(spec.numpy_dtype.kind, depth).decode(text)
    if depth > 1:
        elements = _flatten(elements, spec, shape)
    count = element_count(shape)
    if len(elements) != count:
        raise _count_error(spec, len(elements), shape)
    if spec.dtype == "BYTES":
        encoded = np.empty(count, object)
        encoded[:] = [string.encode() for string in elements]
        return encoded
    return _to_array(elements, spec)


def _flatten(nested: list[Any], spec: TensorSpec, shape: Sequence[int]) -> list[Any]:
    """Row-major elements of nested lists, each level held against the shape."""
    if len(nested) != shape[0]:
        raise _count_error(spec, len(nested), shape)
    for size in shape[1:]:
        if any(length != size for length in set(map(len, nested))):
            raise BadShape(f"input {quote(spec.name)}: data is not nested like its shape")
        nested = list(chain.from_iterable(nested))
    return nested


def _to_array(elements: list[Any], spec: TensorSpec) -> Array:
    try:
        with np.errstate(over="ignore"):  # the infinity is found and refused afterwards
            return np.fromiter(elements, spec.numpy_dtype, len(elements))
    except OverflowError:
        raise BadType(f"input {quote(spec.name)}: a number is out of range for {spec.dtype}") from None


def _decode_in_pieces(text: bytes, depth: int, spec: TensorSpec, shape: Sequence[int]) -> Array:
    """The same for a long array of numbers, without holding them all as Python objects."""
    count = element_count(shape)
    if text.count(b",") + 1 != count:
        raise _count_error(spec, text.count(b",") + 1, shape)
    if depth > 1 and not _is_nested_like(text, shape):
        raise BadShape(f"input {quote(spec.name)}: data is not nested like its shape")
    numbers = text.translate(None, _BRACKETS) if depth > 1 else text.strip()[1:-1]
    decoder = _decoder(spec.numpy_dtype.kind, 1)
    array: Array = np.empty(count, spec.numpy_dtype)  # the body holds as many commas
    start, done = 0, 0
    while start < len(numbers):
        stop = numbers.find(b",", start + _PIECE_BYTES)
        stop = len(numbers) if stop < 0 else stop
        piece = decoder.decode(b"[" + numbers[start:stop] + b"]")
        array[done : done + len(piece)] = _to_array(piece, spec)
        start, done = stop + 1, done + len(piece)
    return array


def _is_nested_like(text: bytes, shape: Sequence[int]) -> bool:
    """Whether brackets and commas stand where an array of `shape` has them."""
    lists = sum(element_count(shape[:axis]) for axis in range(len(shape)))
    if text.count(b"[") != lists:
        return False  # what follows is then no larger than the text
    skeleton = b""
    for size in reversed(shape):
        skeleton = b"[" + (skeleton + b",") * (size - 1) + skeleton + b"]"
    return text.translate(None, _NOT_SKELETON) == skeleton


def _count_error(spec: TensorSpec, found: int, shape: Sequence[int]) -> BadShape:
    return BadShape(
        f"input {quote(spec.name)}: data holds {found} items, which is not what shape {list(shape)} makes"
    )


def _element_error(spec: TensorSpec, message: str) -> RequestError:
    sentence = f"input {quote(spec.name)}: {message}"
    if "out of range" in message:
        return (NonfiniteInput if spec.numpy_dtype.kind == "f" else BadType)(sentence)
    if "`array`" in message:
        return BadShape(sentence)
    return BadType(sentence)


def encode_elements(name: str, array: Array) -> Any:
    """An output's elements as orjson takes them: flat, row-major.

    Raises:
        BadType: It holds bytes that are no UTF-8, which JSON cannot carry.
        InternalError: It holds NaN or infinity, which must be refused before.
    """
    if array.dtype.kind == "O":
        try:
            return [element.decode() for element in array.ravel()]
        except UnicodeDecodeError:
            raise BadType(f"output {quote(name)} is not UTF-8 text: ask for it in binary") from None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InternalError(f"output {quote(name)} is not finite")
    return np.ascontiguousarray(array).ravel()
