"""`PrecisionSpec`: at which precision a tier computes, and what to do where that loses weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from serving.numerics.cards import IEEE, Card

#: * `fp32`: IEEE single precision, nothing less.
#: * `fp16`, `bf16`: weights and activations 16 bits wide.
#: * `mixed`: FP16 with named modules FP32.
#: * `autocast`: FP32 weights; matrix products and convolutions FP16, a list of operators FP32,
#:   everything else by type promotion. Apex O1's idea.
#: * `layercast`: weights and buffers rounded to 16 bits, all arithmetic FP32 (arXiv 2506.09501).
#: * `hf32` (Ascend), `tf32` (CUDA): FP32 whose matrix products and convolutions take operands
#:   with shortened significands.
Kind = Literal["fp32", "fp16", "mixed", "bf16", "autocast", "layercast", "hf32", "tf32"]
WeightFormat = Literal["fp16", "bf16"]
OnWeightLoss = Literal["keep_fp32", "refuse"]

_DTYPES: dict[Kind, torch.dtype] = {
    "fp16": torch.float16,
    "mixed": torch.float16,
    "bf16": torch.bfloat16,
}
_WEIGHT_FORMATS: dict[WeightFormat, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
#: Kinds with 16-bit results.
_ROUNDED: frozenset[Kind] = frozenset({"fp16", "mixed", "bf16", "autocast"})


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    """What an operator declared for one tier."""

    kind: Kind
    #: On a CPU: use torch's own 16-bit kernels instead of the emulation.
    native: bool = False
    #: Names of modules that stay FP32, as in `named_modules()`. None means the kind's default:
    #: for `mixed` the output layer, every normalisation and every softmax; otherwise nothing.
    #: For `layercast` their weights keep 32 bits. Kinds without 16-bit parts ignore it.
    keep_fp32: tuple[str, ...] | None = None
    #: What becomes of a module whose weights the conversion would lose.
    on_weight_loss: OnWeightLoss = "keep_fp32"
    #: For `layercast`: what the weights are rounded to.
    weights: WeightFormat = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that activations are cast to, outside the kept modules.

        For `autocast` that of the model's inputs; operators lower them one by one.
        """
        return _DTYPES.get(self.kind, torch.float32)

    @property
    def lower_dtype(self) -> torch.dtype | None:
        """The narrowest dtype of any weight or operand that the kind casts, or None."""
        if self.kind == "layercast":
            return _WEIGHT_FORMATS[self.weights]
        return torch.float16 if self.kind == "autocast" else _DTYPES.get(self.kind)

    @property
    def rounds_results(self) -> bool:
        """Whether operators have 16-bit results."""
        return self.kind in _ROUNDED

    def emulated_on(self, device_kind: str, card: Card = IEEE) -> bool:
        """Whether FP32 operators stand in for the tier's, with operands or results rounded."""
        if device_kind != "cpu":
            return False
        if self.rounds_results:
            return not self.native
        return card.fp16_cube or self.kind == "hf32"
