"""What a spec says of itself."""

import pytest
import torch

from serving.numerics.precision import Kind, PrecisionSpec


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("fp32", torch.float32), ("fp16", torch.float16), ("mixed", torch.float16), ("bf16", torch.bfloat16)],
)
def test_dtype(kind: Kind, dtype: torch.dtype) -> None:
    """Each kind has its dtype; `mixed` is FP16 outside the kept modules."""
    assert PrecisionSpec(kind).dtype is dtype


def test_emulation_is_for_16_bits_on_a_cpu() -> None:
    """FP32, native tiers and cards are not emulated."""
    assert PrecisionSpec("fp16").emulated_on("cpu")
    assert not PrecisionSpec("fp32").emulated_on("cpu")
    assert not PrecisionSpec("fp16", native=True).emulated_on("cpu")
    assert not PrecisionSpec("fp16").emulated_on("npu")
