"""Number formats: what a step is, and which kind of tier rounds to which format."""

from typing import get_args

import numpy as np
import pytest

from serving.config import TierKind
from serving.divergence.formats import BF16, FORMATS, FP16, FP32, FloatFormat


@pytest.mark.parametrize(("number_format", "dtype"), [(FP16, np.float16), (FP32, np.float32)])
def test_the_smallest_normal_number_is_numpy_s(number_format: FloatFormat, dtype: type) -> None:
    """As the format's standard has it."""
    assert number_format.smallest_normal == float(np.finfo(dtype).smallest_normal)


@pytest.mark.parametrize(("number_format", "dtype"), [(FP16, np.float16), (FP32, np.float32)])
def test_zero_and_subnormal_numbers_have_the_smallest_step(number_format: FloatFormat, dtype: type) -> None:
    """Below the normal numbers all steps are one."""
    step = float(np.finfo(dtype).smallest_subnormal)
    values = np.array([0.0, -0.0, step, -3 * step, number_format.smallest_normal / 2])
    assert number_format.ulp(values).tolist() == [step] * len(values)


def test_bf16_has_the_steps_of_eight_bits() -> None:
    """The exponents are FP32's."""
    assert BF16.ulp(np.array([1.0, 2.0, -256.0])).tolist() == [2.0**-7, 2.0**-6, 2.0]
    assert BF16.smallest_normal == FP32.smallest_normal


def test_every_kind_of_tier_has_a_format() -> None:
    """And no other."""
    assert set(FORMATS) == set(get_args(TierKind))
