"""Cards that a CPU can rehearse: how each departs from IEEE 754 arithmetic.

The rules are read from torch_npu's and CANN's sources and documents; a rehearsal shows what
they do to a model's values and nothing about a card's speed, kernels or operator support.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from serving.errors import ConfigError

CardName = Literal["ieee", "910a", "910b", "310p"]


@dataclass(frozen=True, slots=True)
class Card:
    """The arithmetic of one card."""

    name: CardName
    #: Every FP16 result is finite: infinities become ±65504, NaN becomes 0.
    saturates: bool = False
    #: Has BF16.
    bf16: bool = True
    #: The matrix unit can round FP32 operands to HF32. It does so by default in convolutions;
    #: every tier but `hf32` switches that off.
    hf32: bool = False
    #: The matrix unit has no FP32: matrix products, convolutions and average pooling of FP32
    #: tensors take FP16 operands, accumulate in FP32 and give FP32.
    fp16_cube: bool = False


IEEE = Card("ieee")
CARDS: Mapping[str, Card] = MappingProxyType(
    {
        card.name: card
        for card in (
            IEEE,
            Card("910a", saturates=True, bf16=False, fp16_cube=True),
            Card("910b", hf32=True),
            Card("310p", saturates=True, bf16=False, fp16_cube=True),
        )
    }
)


def find_card(name: str) -> Card:
    """The card of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CARDS:
        raise ConfigError(f"{name!r} is no card; the cards are {', '.join(CARDS)}", "card")
    return CARDS[name]
