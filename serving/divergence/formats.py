"""Floating-point formats, as far as the distance between neighbouring numbers goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from serving.config import TierKind


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary format, after IEEE 754-2019, section 3.3."""

    #: Of the significand, the implicit one included.
    significand_bits: int
    #: Of the smallest normal number.
    min_exponent: int

    @property
    def smallest_normal(self) -> float:
        """Below it, relative precision is lost."""
        return float(2.0**self.min_exponent)

    def ulp(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The distance between neighbouring numbers of the format at each value's magnitude."""
        _, exponents = np.frexp(values)  # |value| = m · 2^e, m in [0.5, 1)
        exponents = np.maximum(np.where(values == 0, self.min_exponent + 1, exponents) - 1, self.min_exponent)
        distances: NDArray[np.float64] = np.ldexp(1.0, exponents - (self.significand_bits - 1))
        return distances


FP16 = FloatFormat(11, -14)
BF16 = FloatFormat(8, -126)
FP32 = FloatFormat(24, -126)

#: The format that a kind of tier rounds its outputs to, or its operands where the outputs are FP32.
#: HF32 and TF32 keep 10 stored bits of the significand and FP32's exponents.
FORMATS: Mapping[TierKind, FloatFormat] = MappingProxyType(
    {
        "fp32": FP32,
        "layercast": FP32,
        "fp16": FP16,
        "mixed": FP16,
        "autocast": FP16,
        "bf16": BF16,
        "hf32": FloatFormat(11, -126),
        "tf32": FloatFormat(11, -126),
    }
)
