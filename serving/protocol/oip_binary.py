"""Tensor elements in the binary extension: raw little-endian bytes behind the JSON."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from serving.errors import BadHeader, BadShape, BadTensor, BadType, InternalError, NonfiniteInput, quote
from serving.protocol.oip_types import JsonScalar
from serving.tensors import Array, Tensors, TensorSpec, all_finite, element_count

_LENGTH = struct.Struct("<I")


class BinaryReader:
    """Hands out the bytes behind the JSON, one tensor after the other."""

    __slots__ = ("_body", "_offset")

    def __init__(self, body: bytes, offset: int) -> None:
        self._body = body
        self._offset = offset

    def read(
        self, spec: TensorSpec, shape: Sequence[int], size_bytes: JsonScalar, *, allow_nonfinite: bool = False
    ) -> Array:
        """The next tensor, a read-only view of the body (`BYTES`: an object array).

        Raises:
            BadHeader: `binary_data_size` is no whole number, or negative.
            BadShape: It is more than what is left, or not what the shape needs.
            BadType: A `BOOL` byte is neither 0 nor 1.
            NonfiniteInput: A float is NaN or infinite, and `allow_nonfinite` is not set.
        """
        left_bytes = len(self._body) - self._offset
        if type(size_bytes) is not int or size_bytes < 0:
            raise BadHeader(
                f"input {quote(spec.name)}: binary_data_size must be a whole number, not negative"
            )
        if size_bytes > left_bytes:
            raise BadShape(
                f"input {quote(spec.name)}: binary_data_size is more than the {left_bytes} bytes left"
            )
        start = self._offset
        self._offset += size_bytes
        if spec.dtype == "BYTES":
            return self._read_strings(spec, shape, start)
        return self._read_numbers(spec, shape, start, size_bytes, allow_nonfinite)

    def finish(self) -> None:
        """Raise `BadHeader` unless every byte belongs to a tensor."""
        left_bytes = len(self._body) - self._offset
        if left_bytes:
            raise BadHeader(f"{left_bytes} bytes behind the last binary tensor belong to none")

    def _read_numbers(
        self, spec: TensorSpec, shape: Sequence[int], start: int, size_bytes: int, allow_nonfinite: bool
    ) -> Array:
        dtype = spec.numpy_dtype
        count = element_count(shape)
        if size_bytes != count * dtype.itemsize:
            raise BadShape(
                f"input {quote(spec.name)}: binary_data_size is {size_bytes}, "
                f"its shape and datatype make {count * dtype.itemsize}"
            )
        array: Array = np.frombuffer(self._body, dtype, count, start)
        if dtype.kind == "f" and not allow_nonfinite and not all_finite(array):
            raise NonfiniteInput(f"input {quote(spec.name)}: the data holds NaN or infinity")
        if dtype.kind == "b" and count and array.view(np.uint8).max() > 1:
            raise BadType(f"input {quote(spec.name)}: a BOOL is a byte of 0 or 1")
        return array.reshape(shape)

    def _read_strings(self, spec: TensorSpec, shape: Sequence[int], start: int) -> Array:
        """Elements that each follow their length, four bytes, little-endian."""
        body, stop, count = self._body, self._offset, element_count(shape)
        if count * _LENGTH.size > stop - start:
            raise BadShape(f"input {quote(spec.name)}: binary_data_size is too small for {count} elements")
        elements: list[bytes] = []
        for _ in range(count):
            begin = start + _LENGTH.size
            if begin > stop:
                raise BadShape(f"input {quote(spec.name)}: the data ends within an element's length")
            start = begin + _LENGTH.unpack_from(body, start)[0]
            if start > stop:
                raise BadShape(f"input {quote(spec.name)}: an element is longer than the data")
            elements.append(body[begin:start])
        if start != stop:
            raise BadShape(f"input {quote(spec.name)}: the data holds more than {count} elements")
        array = np.empty(count, object)
        array[:] = elements
        return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class BinaryLayout:
    """Where numeric tensors lie behind a JSON that was seen before: only values are left to be checked."""

    #: Name, dtype, elements and shape, in the request's order.
    tensors: tuple[tuple[str, np.dtype[Any], int, tuple[int, ...]], ...]
    #: Names in the signature's order.
    order: tuple[str, ...]
    size_bytes: int

    @classmethod
    def of(
        cls, tensors: Sequence[tuple[TensorSpec, Sequence[int], JsonScalar]], order: Sequence[str]
    ) -> Self | None:
        """The layout of tensors with shapes and `binary_data_size`; None where something is amiss."""
        found = []
        size_bytes = 0
        for spec, shape, stated_bytes in tensors:
            if spec.dtype in ("BYTES", "BOOL"):
                return None  # Their values have a form of their own.
            count = element_count(shape)
            if type(stated_bytes) is not int or stated_bytes != count * spec.numpy_dtype.itemsize:
                return None
            found.append((spec.name, spec.numpy_dtype, count, tuple(shape)))
            size_bytes += stated_bytes
        return cls(tuple(found), tuple(order), size_bytes) if len(found) == len(order) else None

    def read(self, body: bytes, offset: int, allow_nonfinite: Collection[str]) -> Tensors:
        """The tensors, read-only views of the body.

        Raises:
            NonfiniteInput: a float is NaN or infinite, and may not be.
        """
        arrays: Tensors = {}
        for name, dtype, count, shape in self.tensors:
            array: Array = np.frombuffer(body, dtype, count, offset)
            if dtype.kind == "f" and not all_finite(array) and name not in allow_nonfinite:
                raise NonfiniteInput(f"input {quote(name)}: the data holds NaN or infinity")
            arrays[name] = array.reshape(shape)
            offset += count * dtype.itemsize
        return arrays if len(arrays) == 1 else {name: arrays[name] for name in self.order}


def refuse_shared_memory(name: str, parameters: dict[str, JsonScalar]) -> None:
    """Raise `BadTensor` for a tensor that is said to lie in the server's shared memory."""
    if any(parameter.startswith("shared_memory") for parameter in parameters):
        raise BadTensor(f"tensor {quote(name)}: shared memory is not served")


def encode_binary(name: str, array: Array) -> bytes:
    """An output's elements, row-major and little-endian.

    Raises:
        InternalError: An element of a `BYTES` output is not `bytes`.
    """
    if array.dtype.kind != "O":
        return array.tobytes()
    pieces: list[bytes] = []
    for element in array.ravel():
        if not isinstance(element, bytes):
            raise InternalError(f"output {quote(name)} holds an element that is not bytes")
        pieces += (_LENGTH.pack(len(element)), element)
    return b"".join(pieces)
