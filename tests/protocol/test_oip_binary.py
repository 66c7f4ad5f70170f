"""Tensor elements in the binary extension."""

import struct
from typing import Any

import numpy as np
import pytest

from serving.errors import BadHeader, BadShape, BadTensor, BadType, InternalError, NonfiniteInput
from serving.protocol.oip_binary import BinaryReader, encode_binary, refuse_shared_memory
from serving.tensors import DTYPES, TensorSpec


def spec(dtype: str) -> TensorSpec:
    """A flat input."""
    return TensorSpec("x", dtype, (-1,))


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "BYTES"])
def test_numbers_are_views_of_the_body(dtype: str) -> None:
    """No copy is made, and the next tensor follows."""
    array = np.array([0, 1, 1], DTYPES[dtype])
    body = b"{}?" + array.tobytes() * 2
    reader = BinaryReader(body, 3)
    for _ in range(2):
        got = reader.read(spec(dtype), [3], array.nbytes)
        assert np.array_equal(got, array)
        assert not got.flags.owndata
        assert not got.flags.writeable
    reader.finish()


@pytest.mark.parametrize("size", [None, "8", 8.0, True, -1])
def test_sizes_that_are_none(size: Any) -> None:
    """A size is a whole number."""
    with pytest.raises(BadHeader):
        BinaryReader(bytes(8), 0).read(spec("FP32"), [2], size)


@pytest.mark.parametrize(
    ("size", "shape"), [(9, [2]), (10**30, [2]), (4, [2]), (7, [2]), (0, [2]), (8, [2**60])]
)
def test_size_shape_and_body_disagree(size: Any, shape: Any) -> None:
    """Whichever is absurd, nothing is allocated for it."""
    with pytest.raises(BadShape):
        BinaryReader(bytes(8), 0).read(spec("FP32"), shape, size)


def test_bytes_that_no_tensor_claims() -> None:
    """Refused rather than ignored."""
    reader = BinaryReader(bytes(9), 0)
    reader.read(spec("FP32"), [2], 8)
    with pytest.raises(BadHeader):
        reader.finish()


@pytest.mark.parametrize("dtype", ["FP16", "FP32", "FP64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_floats(dtype: str, value: Any) -> None:
    """Refused unless the input may hold them."""
    body = np.array([1, value], DTYPES[dtype]).tobytes()
    with pytest.raises(NonfiniteInput):
        BinaryReader(body, 0).read(spec(dtype), [2], len(body))
    got = BinaryReader(body, 0).read(spec(dtype), [2], len(body), allow_nonfinite=True)
    assert not np.isfinite(got[1])


def test_a_bool_is_zero_or_one() -> None:
    """Any other byte would be a bool that is neither true nor false."""
    with pytest.raises(BadType):
        BinaryReader(b"\0\2", 0).read(spec("BOOL"), [2], 2)


STRINGS = [b"", b"a", b"\xff\0", b"x" * 300]


def test_strings() -> None:
    """Each follows its length; any bytes are served."""
    array = np.empty(4, object)
    array[:] = STRINGS
    body = encode_binary("y", array)
    assert body.startswith(b"\0\0\0\0\1\0\0\0a")
    got = BinaryReader(body, 0).read(spec("BYTES"), [4], len(body))
    assert got.tolist() == STRINGS


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\1\0\0",
        struct.pack("<I", 1),
        struct.pack("<I", 2) + b"a",
        struct.pack("<I", 2**32 - 1) + b"a",
        struct.pack("<I", 1) + b"ab",
        struct.pack("<I", 1) + b"a" + struct.pack("<I", 0),
    ],
)
def test_strings_that_overrun(body: bytes) -> None:
    """A length that goes beyond the tensor, although the body may go on."""
    with pytest.raises(BadShape):
        BinaryReader(body + bytes(100), 0).read(spec("BYTES"), [1], len(body))


def test_strings_that_cannot_be_there() -> None:
    """A huge shape is refused by the size alone."""
    with pytest.raises(BadShape):
        BinaryReader(bytes(100), 0).read(spec("BYTES"), [2**60], 100)


def test_outputs_are_row_major() -> None:
    """Whatever the array's layout."""
    array = np.arange(6, dtype="<i4").reshape(2, 3)
    assert encode_binary("y", array.T) == np.ascontiguousarray(array.T).tobytes()
    with pytest.raises(InternalError):
        encode_binary("y", np.array(["text"], object))


def test_shared_memory() -> None:
    """The server has no memory in common with its clients."""
    refuse_shared_memory("x", {"binary_data_size": 4})
    with pytest.raises(BadTensor, match="not served"):
        refuse_shared_memory("x", {"shared_memory_region": "r"})
