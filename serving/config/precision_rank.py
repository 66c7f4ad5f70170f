"""Which kinds of tiers are more precise than others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from serving.config.schema import TierKind

#: More precise kinds have higher ranks, by what is rounded to fewer than 24 significand bits:
#: everything to 8 (BF16); everything to 11 (FP16); the results of matrix products only; all but
#: the borders and normalisations; operands of matrix products only (HF32, TF32); weights only;
#: nothing.
PRECISION_RANK: Mapping[TierKind, int] = MappingProxyType(
    {"bf16": 0, "fp16": 1, "mixed": 2, "autocast": 3, "hf32": 4, "tf32": 4, "layercast": 5, "fp32": 6}
)
