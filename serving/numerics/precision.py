"""`PrecisionSpec`: at which precision a tier computes, and what to do where that loses weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["fp32", "fp16", "mixed", "bf16"]
OnWeightLoss = Literal["keep_fp32", "refuse"]

_DTYPES: dict[Kind, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "mixed": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    """What an operator declared for one tier."""

    kind: Kind
    #: On a CPU: use torch's own 16-bit kernels instead of the emulation.
    native: bool = False
    #: Names of modules that stay FP32, as in `named_modules()`. None means the kind's default:
    #: for `mixed` the output layer, every normalisation and every softmax; otherwise nothing.
    keep_fp32: tuple[str, ...] | None = None
    #: What becomes of a module whose weights the conversion would lose.
    on_weight_loss: OnWeightLoss = "keep_fp32"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that weights and activations are cast to, outside the kept modules."""
        return _DTYPES[self.kind]

    def emulated_on(self, device_kind: str) -> bool:
        """Whether the tier rounds FP32 results rather than running 16-bit kernels."""
        return device_kind == "cpu" and not self.native and self.kind != "fp32"
