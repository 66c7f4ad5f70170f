"""Padding to a bucket: which rows, how many, and that nothing else changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from serving.runtime.buckets import cycled_rows, padded_to_bucket
from serving.tensors import Tensors, row_count

buckets_of = st.sets(st.integers(1, 64), min_size=1, max_size=6).map(sorted)


@st.composite
def batches(draw: st.DrawFn) -> Tensors:
    """Two tensors of the same rows, any dtype and trailing shape."""
    rows = draw(st.integers(1, 70))
    shapes = st.lists(st.integers(1, 3), max_size=2)
    return {
        name: draw(arrays.arrays(draw(st.sampled_from(["<f4", "<f2", "<i8", "?"])), (rows, *draw(shapes))))
        for name in ("x", "mask")
    }


@given(batches(), buckets_of)
def test_rows_stay_and_the_last_is_repeated(batch: Tensors, buckets: list[int]) -> None:
    """Up to the smallest bucket that holds the batch; a larger batch stays as it is."""
    rows = row_count(batch)
    padded = padded_to_bucket(batch, buckets)
    wanted = min((bucket for bucket in buckets if bucket >= rows), default=rows)
    assert list(padded) == list(batch)
    for name, array in batch.items():
        assert padded[name].dtype == array.dtype
        assert padded[name].shape == (wanted, *array.shape[1:])
        np.testing.assert_array_equal(padded[name][:rows], array)
        for row in padded[name][rows:]:
            np.testing.assert_array_equal(row, array[-1])


def test_without_buckets_nothing_is_padded() -> None:
    """Nor is a batch without rows, which has none to repeat."""
    batch = {"x": np.ones((3, 2))}
    assert padded_to_bucket(batch, ())["x"] is batch["x"]
    assert padded_to_bucket({"x": np.ones((0, 2))}, (4,))["x"].shape == (0, 2)


@pytest.mark.parametrize(
    ("rows", "start", "found"), [(2, 0, [0, 1]), (3, 2, [2, 0, 1]), (7, 1, [1, 2, 0, 1, 2, 0, 1])]
)
def test_rows_are_taken_in_a_circle(rows: int, start: int, found: list[int]) -> None:
    """From any number of examples, batches of any size."""
    assert cycled_rows({"x": np.arange(3)}, rows, start)["x"].tolist() == found
