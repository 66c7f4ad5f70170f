"""Signatures and rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tensors import (
    DTYPES,
    FREE,
    Signature,
    TensorSpec,
    element_count,
    row_count,
    slice_rows,
)

SIGNATURE = Signature(
    inputs=(TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "INT64", (-1,))),
    outputs=(TensorSpec("y", "FP32", (-1, -1), kind="logits"),),
)

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.parametrize("name", list(DTYPES))
def test_a_dtype_is_what_its_name_says(name: str) -> None:
    """Width in bits and kind, little-endian on the wire."""
    dtype = TensorSpec("x", name, (-1,)).numpy_dtype
    kinds = {"BOOL": "b", "BYTES": "O", "UINT": "u", "INT": "i", "FP": "f"}
    assert dtype.kind == kinds[name.rstrip("0123456789")]
    assert dtype.byteorder in "<=|"
    bits = name.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert not bits or dtype.itemsize == int(bits) // 8


def test_the_dtypes_cannot_be_changed() -> None:
    """They are shared by all."""
    with pytest.raises(TypeError):
        DTYPES["FP8"] = np.dtype("u1")  # type: ignore[index]


@given(sizes, st.data())
def test_a_shape_fits_where_every_fixed_dimension_is_equal(shape: list[int], data: st.DataObject) -> None:
    """Free dimensions take any size."""
    free = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    spec = TensorSpec("x", "FP32", tuple(FREE if f else n for f, n in zip(free, shape, strict=True)))
    assert spec.accepts(shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    other = [size + (index == axis) for index, size in enumerate(shape)]
    assert spec.accepts(other) == free[axis]


@given(sizes)
def test_another_rank_never_fits(shape: list[int]) -> None:
    """Neither longer nor shorter, free or not."""
    spec = TensorSpec("x", "FP32", (FREE,) * len(shape))
    assert not spec.accepts([*shape, 1])
    assert not spec.accepts(shape[:-1])


def test_tensors_are_found_by_name() -> None:
    """Inputs and outputs apart."""
    assert SIGNATURE.input("b") == SIGNATURE.inputs[1]
    assert SIGNATURE.output("y") == SIGNATURE.outputs[0]
    assert SIGNATURE.input("y") is None
    assert SIGNATURE.output("a") is None


def test_counting_elements_does_not_overflow() -> None:
    """A claimed shape may be absurd."""
    assert element_count([2**40, 2**40]) == 2**80
    assert element_count([]) == 1


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_slices_are_views_of_every_tensor(rows: int, start: int, stop: int) -> None:
    """The same rows of each, nothing copied."""
    tensors = {"a": np.arange(rows * 3).reshape(rows, 3), "b": np.arange(rows)}
    piece = slice_rows(tensors, start, stop)
    assert row_count(tensors) == rows
    assert list(piece) == ["a", "b"]
    for name, array in tensors.items():
        np.testing.assert_array_equal(piece[name], array[start:stop])
        assert piece[name].size == 0 or np.shares_memory(piece[name], array)
