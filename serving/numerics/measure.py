"""Tiny modules with known answers, and what their results say about the arithmetic.

An identity matrix product and a 3 x 3 delta convolution return what they are given, as far as
their operands can hold it: 1 + 2^-k survives where the significand has more than k bits, which
is 24 in FP32, 11 in TF32, HF32 and FP16, 8 in BF16 (the leading bit counted). A sum of 1 and
2^-k, which every format holds, tells the same of the results. What is beyond 65504 survives
only where the range is FP32's.

Attention of a query to one key alone returns that key's value: where the scores lie 256 apart,
softmax gives exactly 1 and 0 (e^-256 is below FP32's smallest subnormal).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from serving.numerics.devices.device import Device

Overflow = Literal["inf", "saturates", "none"]
#: A module -> the same as the tier would run it: takes one tensor, returns one.
Run = Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]

#: Square matrices and channels of the probes; large enough for the kernels of real models.
_WIDTH = 64
_SIDE = 8
_FP32_FRACTION_BITS = 23
FP32_BITS = _FP32_FRACTION_BITS + 1
_FP16_MAX = 65504.0
#: Terms of the reduction probe. Its largest term is 2^10, so that the smallest is an FP16 normal.
_TERMS = 4096
_LARGE = 2.0**10
#: Squared it is the score of a query and its own key; all others are 0.
_CERTAIN = 16.0
#: Steps that the scores are probed with: 2^15 is the largest key that FP16 holds beside them.
_SCORE_STEPS = 15


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Of one operator. Bits are those of significands, the leading one counted."""

    #: Of the operand that comes from the layer before.
    operand_bits: int
    #: Of the weights.
    weight_bits: int
    result_bits: int
    #: What 2 x 65504 and 1e6 become.
    overflow: Overflow


class Meter:
    """Measures the operators of a tier.

    Args:
        run: converts a module as the tier does.
        device: what the result runs on.
    """

    def __init__(self, run: Run, device: Device) -> None:
        self._run = run
        self._device = device

    def matmul(self) -> Arithmetic:
        """Of a linear layer."""
        steps, eye = _steps(), torch.eye(_WIDTH)
        pairs = torch.zeros(_WIDTH, _WIDTH)
        pairs[:, 0], pairs[:, 1] = 1, steps - 1
        two = torch.zeros(_WIDTH, _WIDTH)
        two[:, :2] = 1
        return Arithmetic(
            # Row k of the result is step k in every column, then step k on the diagonal.
            _surviving_bits(self._matmul(eye, steps[:, None].repeat(1, _WIDTH))),
            _surviving_bits(self._matmul(torch.diag(steps), eye).diagonal()[:, None]),
            _surviving_bits(self._matmul(two, pairs)),
            # Off the diagonal are zeros, so an infinity meets 0 x inf nowhere but in its own row.
            _overflow(self._matmul(eye, torch.diag(_beyond_fp16())).diagonal()),
        )

    def conv(self) -> Arithmetic:
        """Of a 3 x 3 convolution."""
        steps, ones = _steps(), torch.ones(_WIDTH)
        image = torch.ones(_WIDTH, _SIDE, _SIDE)
        # Each pixel and its left neighbour are 1 and 2^-k, one way or the other.
        pairs = image.clone()
        pairs[:, :, 0::2] = (steps - 1)[:, None, None]
        summed = self._conv(ones, pairs, left=1.0)[:, :, 1:]
        beyond = self._conv(ones, _beyond_fp16()[:, None, None] * image)
        return Arithmetic(
            _surviving_bits(self._conv(ones, steps[:, None, None] * image).flatten(1)),
            _surviving_bits(self._conv(steps, image).flatten(1)),
            _surviving_bits(summed.flatten(1)),
            _overflow(beyond),
        )

    def attention(self) -> Arithmetic:
        """Of `scaled_dot_product_attention`, which devices compute in one operator of its own."""
        steps, eye = _steps(), torch.eye(_WIDTH)
        alone = _CERTAIN * eye
        # Each query attends to two keys by halves.
        half = _WIDTH // 2
        paired = _CERTAIN * eye[torch.arange(_WIDTH) % half]
        twice = 2 * torch.cat([torch.ones(half), (steps - 1)[:half]])
        values = self._attention(alone, alone, steps[:, None].repeat(1, _WIDTH))
        operand_bits = min(_surviving_bits(values), self._score_bits())
        return Arithmetic(
            operand_bits,
            operand_bits,  # It has no weights.
            _surviving_bits(self._attention(paired, paired, twice[:, None].repeat(1, _WIDTH))),
            _overflow(self._attention(alone, alone, torch.diag(_beyond_fp16())).diagonal()),
        )

    def _score_bits(self) -> int:
        """Of the operands whose products are attention's scores.

        Query k is 1 + 2^-k for one key of 2^k and 1 for another: the scores differ by 1, and
        the weights by a factor of e, unless the step is lost and they are equal.
        """
        query, key = torch.zeros(2, _WIDTH, _WIDTH).unbind()
        k = torch.arange(_SCORE_STEPS)
        finer, plain = 2 * k, 2 * k + 1
        query[k, finer], query[k, plain] = _steps()[k], 1.0
        key[finer, finer] = key[plain, plain] = torch.exp2(k + 1.0)
        weights = self._attention(query, key, torch.eye(_WIDTH))
        differ = weights[k, finer] > math.sqrt(math.e) * weights[k, plain]
        survived = int(differ.int().cumprod(0).sum())
        return FP32_BITS if survived == _SCORE_STEPS else 1 + survived

    def vector_bits(self) -> int:
        """Of a sum that no matrix unit computes."""
        terms = torch.zeros(_WIDTH, _WIDTH)
        terms[:, 0] = _steps()
        return _surviving_bits(self._on_host(_Sum(), terms)[:, None])

    def accumulation_bits(self) -> int:
        """Of the accumulator of a product of 4096 terms.

        A large term, a small one and the large one's negative leave the small one, in whatever
        order and wherever they stand, if the accumulator has bits for both. 4096 ones must not
        stop at 2048.
        """
        rows = [_reduction(places) for places in _places()]
        ones = torch.ones(1, _TERMS)
        linear = nn.Linear(_TERMS, 16, bias=False)
        linear.weight = nn.Parameter(torch.ones(16, _TERMS), requires_grad=False)
        sums = self._on_host(linear, torch.cat([*rows, ones]))
        small = _LARGE * (_steps()[:_FP32_FRACTION_BITS] - 1)
        exact = (sums[:-1].view(len(rows), _FP32_FRACTION_BITS, -1) == small[:, None]).all(dim=2).all(dim=0)
        bits = 1 + int(exact.int().cumprod(0).sum())
        return bits if bool((sums[-1] == _TERMS).all()) else min(bits, 11)

    def subnormals(self) -> bool:
        """Whether 2^-24, the smallest FP16 subnormal, survives a matrix product."""
        smallest = torch.full((_WIDTH, _WIDTH), 2.0**-24)
        return bool((self._matmul(torch.eye(_WIDTH), smallest) == smallest).all())

    def _matmul(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`x` @ `weight`ᵀ as the tier computes it."""
        linear = nn.Linear(_WIDTH, _WIDTH, bias=False)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return self._on_host(linear, x)

    def _conv(self, centres: torch.Tensor, x: torch.Tensor, *, left: float = 0.0) -> torch.Tensor:
        """Each channel of `x` [channels, height, width] times its kernel's centre.

        `left` times the left neighbour is added.
        """
        conv = nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False)
        weight = torch.zeros(_WIDTH, _WIDTH, 3, 3)
        weight[:, :, 1, 1] = torch.diag(centres)
        weight[:, :, 1, 0] = left * torch.eye(_WIDTH)
        conv.weight = nn.Parameter(weight, requires_grad=False)
        return self._on_host(conv, x[None])[0]

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention over _WIDTH tokens of one head, each operand [_WIDTH, _WIDTH]."""
        return self._on_host(_Attention(), torch.stack([query, key, value]))

    def _on_host(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What the tier makes of `module`, applied to `x`."""
        tier = self._run(module)
        with self._device.running():
            result = tier(x.to(self._device.torch_device))
            self._device.synchronize()
        return result.cpu()


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [3, tokens, width], query, key and value -> [tokens, width]."""
        # Four dimensions, rows and heads first: those of the kernels that devices have for it.
        query, key, value = x[:, None, None].unbind()
        return nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0)[0, 0]


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, terms] -> [rows]."""
        return x.sum(dim=-1)


def _steps() -> torch.Tensor:
    """1 + 2^-k for k = 1..23, then ones: [_WIDTH]. Each needs k + 1 significand bits."""
    steps = torch.ones(_WIDTH)
    exponents = torch.arange(1, _FP32_FRACTION_BITS + 1, dtype=torch.float32)
    steps[:_FP32_FRACTION_BITS] += torch.exp2(-exponents)
    return steps


def _surviving_bits(results: torch.Tensor) -> int:
    """Significand bits of an arithmetic that made `results`, [_WIDTH, n], of `_steps`."""
    exact = (results == _steps()[:, None]).all(dim=1)[:_FP32_FRACTION_BITS]
    return 1 + int(exact.int().cumprod(0).sum())


def _beyond_fp16() -> torch.Tensor:
    """2 x 65504 and 1e6 by turns: [_WIDTH]."""
    beyond = torch.full((_WIDTH,), 2 * _FP16_MAX)
    beyond[1::2] = 1e6
    return beyond


def _overflow(results: torch.Tensor) -> Overflow:
    if not torch.isfinite(results).all():
        return "inf"
    return "none" if bool((results > 1.5 * _FP16_MAX).all()) else "saturates"


def _places() -> list[tuple[int, ...]]:
    """Where the large term, the small one and the negative stand: neighbours, and far apart."""
    return [
        order
        for spread in ((0, 1, 2), (0, _TERMS // 2, _TERMS - 1))
        for order in itertools.permutations(spread)
    ]


def _reduction(places: Sequence[int]) -> torch.Tensor:
    """Terms [23, 4096]: 2^10, 2^10 x 2^-k and -2^10 at `places`, zeros elsewhere."""
    large, small, negative = places
    terms = torch.zeros(_FP32_FRACTION_BITS, _TERMS)
    terms[:, large], terms[:, negative] = _LARGE, -_LARGE
    terms[:, small] = _LARGE * (_steps()[:_FP32_FRACTION_BITS] - 1)
    return terms
