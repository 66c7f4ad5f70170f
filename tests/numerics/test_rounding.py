"""Rounding equals a cast to 16 bits and back, wherever the tensor lies."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from serving.numerics.rounding import overlaps_itself, representable, round_in_place, rounded, shortened

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


def short_by_integers(bits: int) -> int:
    """The reference for HF32 and TF32: FP32's bits to the nearest multiple of 2^13, ties to even."""
    sign, magnitude = bits & 0x8000_0000, bits & 0x7FFF_FFFF
    if magnitude > 0x7F80_0000:  # NaN
        return bits
    kept, dropped = divmod(magnitude, 1 << 13)
    if dropped > 1 << 12 or (dropped == 1 << 12 and kept % 2):
        kept += 1
    return sign | kept << 13


@given(values=ANY_FP32)
@settings(deadline=None)
def test_shortened_equals_integer_arithmetic(values: np.ndarray) -> None:
    """Every FP32 bit pattern becomes what integers say; the input stays; twice changes nothing."""
    tensor = torch.from_numpy(values.copy())
    result = shortened(tensor)
    bits = [short_by_integers(int(pattern)) for pattern in values.view(np.uint32).flatten()]
    assert result.numpy().view(np.uint32).flatten().tolist() == bits
    assert tensor.numpy().tobytes() == values.tobytes()
    assert same_bits(shortened(result), result)


@given(pair=st.tuples(*[st.floats(width=32, allow_nan=False)] * 2).map(sorted))
def test_shortened_is_monotone(pair: list[float]) -> None:
    """A larger number never becomes the smaller one."""
    low, high = shortened(torch.tensor(pair)).tolist()
    assert low <= high


@given(number=st.floats(width=16))
def test_shortened_keeps_what_fp16_holds(number: float) -> None:
    """FP16 has no more significand bits than HF32 and TF32."""
    assert same_bits(shortened(torch.tensor([number])), torch.tensor([number]))


def test_shortened_known_values() -> None:
    """Ties to even, a carry into the exponent, the range of FP32, strides."""
    values = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 2 - 2.0**-12, 1e30, 2.0**-140, 3.4028235e38])
    expected = [1.0, 1 + 2.0**-9, 2.0, torch.tensor(1e30).item(), 2.0**-140, math.inf]
    result = shortened(values[:, None].expand(6, 2).t())
    assert result[0].tolist() == pytest.approx(expected, rel=2.0**-11)
    assert result[0, :3].tolist() == expected[:3]
    assert result[0, 5].item() == math.inf


@given(values=ANY_FP32)
@settings(deadline=None)
def test_saturated_is_finite(values: np.ndarray) -> None:
    """Finite results are those of the cast, infinities the largest number, NaN zero."""
    tensor = torch.from_numpy(values.copy())
    cast = tensor.half().float()
    result = rounded(tensor, torch.float16, saturate=True)
    assert torch.isfinite(result).all()
    assert torch.equal(result[torch.isfinite(cast)], cast[torch.isfinite(cast)])
    assert (result[torch.isinf(cast)].abs() == 65504).all()
    assert (result[torch.isnan(cast)] == 0).all()
    round_in_place(tensor, torch.float16, saturate=True)
    assert torch.equal(tensor, result)


def test_infinity_is_no_number_of_a_saturating_card() -> None:
    """A constant of -inf must be rounded there."""
    assert representable(-math.inf, torch.float16)
    assert not representable(-math.inf, torch.float16, True)
    assert representable(2, torch.float16, True)
