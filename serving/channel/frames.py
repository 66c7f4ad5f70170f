"""Frames: one batch, or one reply, as bytes.

::

    u32 head bytes | u64 payload bytes | head (MessagePack) | padding | payload

The head describes the tensors; the payload is their raw elements. Lengths are little-endian, and
padding of up to 15 bytes puts the payload, and each tensor in it, at a multiple of 16 from the
start of the head. Nothing is unpickled: a frame can hold numbers, `BYTES` elements and text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from serving.errors import (
    Deadline,
    DeviceLost,
    DeviceOutOfMemory,
    InternalError,
    ModelError,
    NotReady,
    PrecisionUnavailable,
    RequestError,
)
from serving.protocol.oip_binary import BinaryReader, encode_binary
from serving.tensors import Array, Tensors, TensorSpec, element_count

MAX_HEAD_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 32
_LENGTHS = struct.Struct("<IQ")
_ALIGNMENT_BYTES = 16
_BYTES = "BYTES"
#: Booleans, integers, floats: what a frame's raw tensors may be.
_RAW_KINDS = frozenset("biuf")

#: The errors that a replica answers with, by code.
_ERRORS: dict[str, type[RequestError]] = {
    kind.code: kind
    for kind in (
        Deadline,
        DeviceLost,
        DeviceOutOfMemory,
        InternalError,
        ModelError,
        NotReady,
        PrecisionUnavailable,
    )
}


class FrameError(Exception):
    """The peer sent what is no frame. The connection is of no more use."""


class TensorHead(msgspec.Struct, array_like=True, gc=False):
    """One tensor of a frame."""

    name: str
    #: numpy's name of the dtype, or `BYTES`.
    dtype: str
    shape: tuple[int, ...]
    #: In the payload, without the padding behind it.
    size_bytes: int


class Head(msgspec.Struct, array_like=True, gc=False):
    """What a frame is. A request has tensors; a reply tensors, or an error."""

    #: Pairs a reply with its request.
    id: int
    tensors: tuple[TensorHead, ...] = ()
    #: Of a reply: on the device.
    compute_s: float = 0.0
    #: Of a request: only if the replica has nothing else to do.
    is_background: bool = False
    error_code: str = ""
    error: str = ""
    #: Of a request: how long somebody waits for its rows from now on; 0: no limit is known.
    timeout_s: float = 0.0
    #: Nobody waits for the batch of this id any more.
    is_cancellation: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame."""

    head: Head
    tensors: Tensors

    def raise_error(self) -> None:
        """Raise the error that a reply carries, if it does."""
        if self.head.error_code:
            raise _ERRORS.get(self.head.error_code, InternalError)(self.head.error)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)


def encode_frame(
    frame_id: int,
    tensors: Tensors,
    *,
    compute_s: float = 0.0,
    is_background: bool = False,
    timeout_s: float = 0.0,
) -> list[bytes | memoryview]:
    """A frame in pieces, to be written one after the other; tensors are not copied.

    Raises:
        InternalError: a tensor's dtype cannot be sent.
    """
    heads: list[TensorHead] = []
    payload: list[bytes | memoryview] = []
    payload_bytes = 0
    for name, array in tensors.items():
        dtype, elements, size_bytes = _encode_tensor(name, array)
        heads.append(TensorHead(name, dtype, array.shape, size_bytes))
        padding_bytes = -size_bytes % _ALIGNMENT_BYTES
        payload.append(elements)
        if padding_bytes:
            payload.append(bytes(padding_bytes))
        payload_bytes += size_bytes + padding_bytes
    head = _encoder.encode(Head(frame_id, tuple(heads), compute_s, is_background, timeout_s=timeout_s))
    return [*_opening(head, payload_bytes), *payload]


def encode_cancellation(frame_id: int) -> list[bytes | memoryview]:
    """Tells a replica that nobody waits for a batch any more."""
    return _opening(_encoder.encode(Head(frame_id, is_cancellation=True)), 0)


def encode_error(frame_id: int, error: RequestError) -> list[bytes | memoryview]:
    """A reply that carries an error."""
    return _opening(_encoder.encode(Head(frame_id, error_code=error.code, error=str(error))), 0)


def _opening(head: bytes, payload_bytes: int) -> list[bytes | memoryview]:
    return [_LENGTHS.pack(len(head), payload_bytes) + head + bytes(-len(head) % _ALIGNMENT_BYTES)]


def _aligned(size_bytes: int) -> int:
    return size_bytes + -size_bytes % _ALIGNMENT_BYTES


def _encode_tensor(name: str, array: Array) -> tuple[str, bytes | memoryview, int]:
    if array.dtype.kind == "O":
        elements = encode_binary(name, array)
        return _BYTES, elements, len(elements)
    if array.dtype.kind not in _RAW_KINDS:
        raise InternalError(f"a tensor of dtype {array.dtype} cannot be sent to a tier")
    if array.nbytes == 0:
        return array.dtype.str, b"", 0
    return array.dtype.str, np.ascontiguousarray(array).data.cast("B"), array.nbytes


class FrameReader:
    """Puts frames together from the bytes of a stream, in whatever pieces they come."""

    def __init__(self) -> None:
        self._lengths = bytearray()
        self._body: bytearray | None = None
        self._head_bytes = 0
        self._filled_bytes = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete with `data`.

        Raises:
            FrameError: these are no frames, or too large.
        """
        view = memoryview(data)
        while view:
            if self._body is None:
                view = self._feed_lengths(view)
                continue
            taken = min(len(self._body) - self._filled_bytes, len(view))
            self._body[self._filled_bytes : self._filled_bytes + taken] = view[:taken]
            self._filled_bytes += taken
            view = view[taken:]
            if self._filled_bytes == len(self._body):
                body, self._body = self._body, None
                yield decode_body(body, self._head_bytes)

    def _feed_lengths(self, view: memoryview) -> memoryview:
        missing = _LENGTHS.size - len(self._lengths)
        self._lengths += view[:missing]
        if len(self._lengths) == _LENGTHS.size:
            self._head_bytes, payload_bytes = _LENGTHS.unpack(self._lengths)
            if not 0 < self._head_bytes <= MAX_HEAD_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise FrameError(f"a frame of {self._head_bytes} + {payload_bytes} bytes")
            self._lengths.clear()
            self._body = bytearray(_aligned(self._head_bytes) + payload_bytes)
            self._filled_bytes = 0
        return view[missing:]


def decode_body(body: bytearray, head_bytes: int) -> Frame:
    """A frame from its head and payload. Tensors are writable views of `body`.

    Raises:
        FrameError: the head is not one, or does not describe the payload.
    """
    try:
        head = _decoder.decode(memoryview(body)[:head_bytes])
        return Frame(head, _decode_tensors(body, _aligned(head_bytes), head.tensors))
    except (msgspec.MsgspecError, RequestError, TypeError, ValueError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error


def _decode_tensors(body: bytearray, offset: int, heads: Sequence[TensorHead]) -> Tensors:
    tensors: Tensors = {}
    for head in heads:
        stop = offset + head.size_bytes
        if head.size_bytes < 0 or stop > len(body):
            raise FrameError("a tensor ends behind its frame")
        tensors[head.name] = _decode_tensor(body, offset, head)
        offset = _aligned(stop)
    if offset != len(body):
        raise FrameError(f"{len(body) - offset} bytes of a frame belong to no tensor")
    return tensors


def _decode_tensor(body: bytearray, offset: int, head: TensorHead) -> Array:
    if head.dtype == _BYTES:
        reader = BinaryReader(bytes(memoryview(body)[offset : offset + head.size_bytes]), 0)
        return reader.read(TensorSpec(head.name, _BYTES, head.shape), head.shape, head.size_bytes)
    dtype = np.dtype(head.dtype)
    count = element_count(head.shape)
    if dtype.kind not in _RAW_KINDS or count * dtype.itemsize != head.size_bytes:
        raise FrameError(f"a tensor of dtype {dtype} and {count} elements has {head.size_bytes} bytes")
    array: Array = np.frombuffer(body, dtype, count, offset)
    return array.reshape(head.shape)
