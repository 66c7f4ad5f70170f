"""What a spec says of itself."""

from typing import get_args

import pytest
import torch

from serving.numerics.cards import CARDS
from serving.numerics.precision import Kind, PrecisionSpec


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("fp32", torch.float32), ("fp16", torch.float16), ("mixed", torch.float16), ("bf16", torch.bfloat16),
        ("autocast", torch.float32), ("layercast", torch.float32), ("hf32", torch.float32),
        ("tf32", torch.float32),
    ],
)  # fmt: skip
def test_dtype(kind: Kind, dtype: torch.dtype) -> None:
    """Each kind has its dtype; `mixed` is FP16 outside the kept modules."""
    assert PrecisionSpec(kind).dtype is dtype


def test_lower_dtype() -> None:
    """What weights or operands are cast to; FP32 kinds cast nothing."""
    lower = {kind: PrecisionSpec(kind).lower_dtype for kind in get_args(Kind)}
    assert [kind for kind, dtype in lower.items() if dtype is None] == ["fp32", "hf32", "tf32"]
    assert lower["autocast"] is lower["layercast"] is torch.float16
    assert PrecisionSpec("layercast", weights="bf16").lower_dtype is torch.bfloat16


def test_emulation_is_for_16_bits_on_a_cpu() -> None:
    """FP32, native tiers and cards are not emulated."""
    assert PrecisionSpec("fp16").emulated_on("cpu")
    assert not PrecisionSpec("fp32").emulated_on("cpu")
    assert not PrecisionSpec("fp16", native=True).emulated_on("cpu")
    assert not PrecisionSpec("fp16").emulated_on("npu")


def test_cards_emulate_fp32_kinds_too() -> None:
    """FP32 is itself on a 910B and something else on a 910A; layercast follows it; hf32 is rounding."""
    for kind in ("fp32", "layercast"):
        assert not PrecisionSpec(kind).emulated_on("cpu", CARDS["910b"])
        assert PrecisionSpec(kind).emulated_on("cpu", CARDS["910a"])
    assert PrecisionSpec("hf32").emulated_on("cpu", CARDS["910b"])
    assert not PrecisionSpec("fp32").emulated_on("npu", CARDS["910a"])
