"""Rounding FP32 values to those that a narrower format can represent, still held in FP32.

Rounding a tensor `t` to a 16-bit dtype means ``t.to(dtype).to(torch.float32)``, bit for bit: to
nearest, ties to even (IEEE 754-2019 §4.3.1); beyond the dtype's range to infinity; FP16
subnormals kept; NaN kept. Where a card saturates, infinities then become the dtype's largest
value and NaN becomes 0.

HF32 and TF32 keep FP32's sign and exponent and 10 explicit bits of the significand.
"""

from __future__ import annotations

import functools
import math

import torch

#: Above this many elements a tensor is rounded piece by piece, so that the 16-bit copy of a
#: piece stays in the cache. Measured on one AVX-512 core: 4 M elements 0.91 -> 0.64 ms.
_PIECE_ELEMENTS = 1 << 18
_WHOLE_ELEMENTS = 1 << 20
#: Of FP32's 23 explicit significand bits those that HF32 and TF32 have not.
_DROPPED_BITS = 13
#: Half of the last bit that stays.
_HALFWAY = 1 << (_DROPPED_BITS - 1)
#: Rows, channels, height, width.
_IMAGE_DIMENSIONS = 4


def rounded(tensor: torch.Tensor, dtype: torch.dtype, *, saturate: bool = False) -> torch.Tensor:
    """`tensor` rounded through `dtype`: a new FP32 tensor of the same shape.

    Args:
        tensor: floating point, any shape. FP64 is rounded directly, not through FP32 first.
        dtype: `torch.float16` or `torch.bfloat16`.
        saturate: give no infinities and no NaN.
    """
    narrow = tensor.to(dtype).to(torch.float32)
    return _saturate(narrow, dtype) if saturate else narrow


def round_in_place(tensor: torch.Tensor, dtype: torch.dtype, *, saturate: bool = False) -> None:
    """Round an FP32 tensor where it lies, whatever its strides.

    Args:
        tensor: FP32, any shape; no two of its elements may share memory.
        dtype: `torch.float16` or `torch.bfloat16`.
        saturate: leave no infinities and no NaN.
    """
    _round_in_place(tensor, dtype)
    if saturate:
        _saturate(tensor, dtype)


def shortened(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` rounded to HF32 or TF32, to nearest, ties to even: a new FP32 tensor.

    Args:
        tensor: FP32, any shape. What rounds beyond FP32's range becomes infinite; NaN is kept.
    """
    bits = tensor.view(torch.int32)
    # In place on one copy: half of the time goes into memory.
    short = bits >> _DROPPED_BITS
    short &= 1
    short += bits
    short += _HALFWAY - 1
    short &= ~(2 * _HALFWAY - 1)
    result = short.view(torch.float32)
    # A carry out of the fraction raises the exponent, as it should; in a NaN it does harm.
    nan = torch.isnan(tensor)
    return torch.where(nan, tensor, result) if bool(nan.any()) else result


def _saturate(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return torch.nan_to_num_(tensor, nan=0.0, posinf=largest, neginf=-largest)


def _round_in_place(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.numel() <= _WHOLE_ELEMENTS:
        tensor.copy_(tensor.to(dtype))
        return
    flat = _flat_view(tensor)
    if flat is None:
        tensor.copy_(tensor.to(dtype))
        return
    narrow = torch.empty(_PIECE_ELEMENTS, dtype=dtype, device=tensor.device)
    for piece in torch.split(flat, _PIECE_ELEMENTS):
        # piece: [at most _PIECE_ELEMENTS]
        held = narrow[: piece.numel()]
        held.copy_(piece)
        piece.copy_(held)


def _flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """All elements in one dimension without copying, or None where the strides forbid it."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() == _IMAGE_DIMENSIONS and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).view(-1)
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of `tensor` may share memory, as those of an expanded tensor do."""
    extent = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride < extent:
            return True
        extent = stride * size
    return False


@functools.lru_cache(maxsize=1024)
def representable(number: float, dtype: torch.dtype, finite: bool = False) -> bool:
    """Whether a Python number is one of `dtype`'s values: 6.0 is, 0.1 and 1e-12 are not.

    NaN and infinities are unless `finite`.
    """
    if finite and isinstance(number, float) and not math.isfinite(number):
        return False
    try:
        narrow = float(torch.tensor(float(number), dtype=torch.float64).to(dtype))
    except OverflowError:
        return False
    return narrow == number or math.isnan(number)
