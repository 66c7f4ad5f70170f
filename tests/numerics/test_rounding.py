"""Rounding equals a cast to 16 bits and back, wherever the tensor lies."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from serving.numerics.rounding import overlaps_itself, representable, round_in_place, rounded

DTYPES = (torch.float16, torch.bfloat16)
#: Any bit pattern: infinities, NaN with payloads, subnormals, both zeros.
ANY_FP32 = npst.arrays(np.uint32, npst.array_shapes(max_dims=4, max_side=9)).map(lambda a: a.view(np.float32))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, any NaN like any other."""
    both_nan = torch.isnan(a) & torch.isnan(b)
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | both_nan).all())


@pytest.mark.parametrize("dtype", DTYPES)
@given(values=ANY_FP32)
@settings(deadline=None)
def test_rounds_like_a_cast_and_leaves_the_input(dtype: torch.dtype, values: np.ndarray) -> None:
    """Every FP32 bit pattern is rounded as the cast rounds it; out of place keeps the input."""
    tensor = torch.from_numpy(values.copy())
    result = rounded(tensor, dtype)
    assert same_bits(result, tensor.to(dtype).to(torch.float32))
    assert tensor.numpy().tobytes() == values.tobytes()
    round_in_place(tensor, dtype)
    assert same_bits(tensor, result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_known_values(dtype: torch.dtype) -> None:
    """Overflow gives infinity, ties go to even, subnormals and NaN stay."""
    values = torch.tensor([65504.0, 65520.0, 1e6, 2.0**-24, 2.0**-26, 1 + 2**-11, math.nan, -math.inf])
    round_in_place(values, dtype)
    if dtype is torch.float16:
        assert values[:6].tolist() == [65504.0, math.inf, math.inf, 2.0**-24, 0.0, 1.0]
    else:
        assert values[3].item() == 2.0**-24
        assert torch.isfinite(values[:6]).all()
    assert torch.isnan(values[6])
    assert values[7].item() == -math.inf


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "transposed"])
def test_large_tensors_in_pieces(layout: str) -> None:
    """A tensor above the piece size is rounded completely, and nothing around it."""
    whole = torch.randn(3, 64, 80, 160)
    tensor = {
        "contiguous": whole,
        "channels_last": whole.to(memory_format=torch.channels_last),
        "strided": whole[..., ::2],
        "transposed": whole.transpose(1, 3),
    }[layout]
    expected = tensor.half().float()
    untouched = whole[..., 1::2].clone()
    round_in_place(tensor, torch.float16)
    assert torch.equal(tensor, expected)
    if layout == "strided":
        assert torch.equal(whole[..., 1::2], untouched)


def test_overlaps_itself() -> None:
    """Expanded and sliding views overlap; transposed, sliced and empty ones don't."""
    base = torch.arange(12.0).view(3, 4)
    assert overlaps_itself(base[:1].expand(5, 4))
    assert overlaps_itself(torch.arange(8.0).unfold(0, 4, 1))
    assert not overlaps_itself(base.t())
    assert not overlaps_itself(base[:, ::2])
    assert not overlaps_itself(torch.empty(0, 3))


@given(number=st.floats(width=16, allow_nan=True))
def test_fp16_numbers_are_representable(number: float) -> None:
    """Whatever FP16 holds counts as representable."""
    assert representable(number, torch.float16)


@pytest.mark.parametrize("number", [0.1, 1e-12, -1e9, 2049, 10**400])
def test_other_numbers_are_not(number: float) -> None:
    """Numbers that FP16 would round, flush or overflow."""
    assert not representable(number, torch.float16)
