"""Frames: what goes in comes out, in whatever pieces; garbage is refused."""

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from serving.channel.frames import (
    MAX_HEAD_BYTES,
    FrameError,
    FrameReader,
    encode_error,
    encode_frame,
)
from serving.errors import (
    Deadline,
    DeviceLost,
    DeviceOutOfMemory,
    InternalError,
    ModelError,
    NotReady,
    PrecisionUnavailable,
    RequestError,
    TooLarge,
)
from serving.tensors import DTYPES, Tensors

NUMBERS = st.sampled_from([dtype for dtype in DTYPES.values() if dtype.kind != "O"]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
)


def bytes_array(elements: list[bytes]) -> Any:
    """A `BYTES` tensor."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


STRINGS = st.lists(st.binary(max_size=20), min_size=1, max_size=4).map(bytes_array)
TENSORS = st.dictionaries(st.text(min_size=1, max_size=5), NUMBERS | STRINGS, max_size=4)


def encoded(tensors: Tensors, frame_id: int = 7, compute_s: float = 0.5) -> bytes:
    """A frame's bytes."""
    return b"".join(encode_frame(frame_id, tensors, compute_s=compute_s))


@given(st.lists(TENSORS, min_size=1, max_size=3), st.integers(1, 50))
def test_frames_arrive_as_they_were_sent(sent: list[Tensors], piece_bytes: int) -> None:
    """Whatever the tensors, and however the stream is cut."""
    stream = b"".join(encoded(tensors, number) for number, tensors in enumerate(sent))
    reader = FrameReader()
    frames = [
        frame
        for start in range(0, len(stream), piece_bytes)
        for frame in reader.feed(stream[start : start + piece_bytes])
    ]
    assert [frame.head.id for frame in frames] == list(range(len(sent)))
    for frame, tensors in zip(frames, sent, strict=True):
        assert list(frame.tensors) == list(tensors)
        for name, array in tensors.items():
            assert frame.tensors[name].dtype == array.dtype
            assert frame.tensors[name].shape == array.shape
            assert frame.tensors[name].tobytes() == array.tobytes() or array.dtype.kind == "O"
            np.testing.assert_array_equal(frame.tensors[name], array)


def test_tensors_are_aligned_and_writable() -> None:
    """As torch wants them, without a copy."""
    tensors = {"a": np.ones(3, np.uint8), "b": np.ones((2, 3), np.float64)}
    [frame] = FrameReader().feed(encoded(tensors))
    for array in frame.tensors.values():
        assert array.flags.aligned
        assert array.flags.writeable


def test_what_is_not_contiguous_arrives_in_order() -> None:
    """A transposed output, say."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    [frame] = FrameReader().feed(encoded({"y": array}))
    np.testing.assert_array_equal(frame.tensors["y"], array)


def test_tensors_are_sent_without_a_copy() -> None:
    """A batch may be large."""
    array = np.zeros(1000, np.float32)
    assert any(
        np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in encode_frame(1, {"x": array})
    )


@pytest.mark.parametrize(
    "kind",
    [Deadline, DeviceLost, DeviceOutOfMemory, InternalError, ModelError, NotReady, PrecisionUnavailable],
)
def test_errors_keep_their_class_and_sentence(kind: type[RequestError]) -> None:
    """The gateway answers with them."""
    [frame] = FrameReader().feed(b"".join(encode_error(3, kind("no é room"))))
    with pytest.raises(kind, match="no é room"):
        frame.raise_error()


def test_an_error_that_replicas_do_not_raise_is_internal() -> None:
    """A replica has no say in who is told what else."""
    [frame] = FrameReader().feed(b"".join(encode_error(3, TooLarge("x"))))
    with pytest.raises(InternalError):
        frame.raise_error()


def test_a_reply_without_an_error_raises_nothing() -> None:
    """And carries its time."""
    [frame] = FrameReader().feed(encoded({}))
    frame.raise_error()
    assert frame.head.compute_s == 0.5


@pytest.mark.parametrize("dtype", ["M8[s]", "c8", "U3", "V4"])
def test_a_dtype_beyond_numbers_and_bytes_is_not_sent(dtype: str) -> None:
    """No model takes or gives one."""
    with pytest.raises(InternalError, match="cannot be sent"):
        encode_frame(1, {"x": np.zeros(2, dtype)})


def with_lengths(head_bytes: int, payload_bytes: int) -> bytes:
    """The opening of a frame."""
    return struct.pack("<IQ", head_bytes, payload_bytes)


def damaged(change: Any) -> bytes:
    """A frame, changed."""
    return bytes(change(bytearray(encoded({"x": np.arange(4, dtype=np.float32)}))))


@pytest.mark.parametrize(
    "stream",
    [
        with_lengths(0, 0),
        with_lengths(MAX_HEAD_BYTES + 1, 0),
        with_lengths(10, 1 << 40),
        with_lengths(3, 0) + b"\xc1\xc1\xc1" + bytes(13),
        damaged(lambda frame: frame.replace(b"<f4", b"<f8")),
        damaged(lambda frame: frame.replace(b"<f4", b"|O8")),
        damaged(lambda frame: frame.replace(b"<f4", b"zzz")),
        with_lengths(5, 16) + b"\x95\x01\x90\x00\xa0" + bytes(11 + 16),
    ],
)
def test_garbage_is_refused(stream: bytes) -> None:
    """Before anything large is allocated for it, and without anything being executed."""
    with pytest.raises(FrameError):
        list(FrameReader().feed(stream))


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(stream: bytes) -> None:
    """Whatever a peer sends."""
    with contextlib.suppress(FrameError):
        list(FrameReader().feed(stream))


@given(st.data())
def test_no_damage_raises_anything_else(data: st.DataObject) -> None:
    """A frame with one byte changed is a frame, or is refused."""
    frame = bytearray(encoded({"x": np.arange(3, dtype=np.int64), "s": bytes_array([b"ab", b""])}))
    # The lengths apart: a longer frame would only be waited for.
    frame[data.draw(st.integers(12, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FrameError):
        list(FrameReader().feed(bytes(frame)))
