"""Rehearsed cards: each rule shown by values chosen for it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.errors import ConfigError
from serving.numerics.cards import CARDS, find_card
from serving.numerics.conversion import convert
from serving.numerics.devices import open_device
from serving.numerics.precision import Kind, PrecisionSpec


class Of(nn.Module):
    """A model that is one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Whatever the function makes of X."""
        return self.function(x)


def on(card: str, kind: Kind, module: nn.Module | Callable[[Tensor], Tensor], x: Tensor) -> list[float]:
    """The module's answer at a kind on a card."""
    module = module if isinstance(module, nn.Module) else Of(module)
    tier = convert(module, PrecisionSpec(kind), open_device("cpu", 1, card))
    return tier(x).flatten().tolist()


@pytest.mark.parametrize("card", ["910a", "310p"])
@pytest.mark.parametrize("kind", ["fp16", "mixed", "autocast"])
def test_old_cards_saturate(card: str, kind: Kind) -> None:
    """An FP16 product beyond the range is the largest number, and NaN is 0."""
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(torch.tensor([[60000.0]]), requires_grad=False)
    tier = convert(linear, PrecisionSpec(kind, keep_fp32=()), open_device("cpu", 1, card))
    assert tier(torch.tensor([[4.0]])).item() == 65504


@pytest.mark.parametrize(
    ("function", "x", "ieee", "saturated"),
    [
        (torch.exp, 12.0, math.inf, 65504.0),
        (lambda x: x * 4, -60000.0, -math.inf, -65504.0),
        (torch.sqrt, -1.0, math.nan, 0.0),
        (lambda x: x.masked_fill(x > 0, -math.inf), 1.0, -math.inf, -65504.0),
        (lambda x: x + torch.full((1,), math.inf), 1.0, math.inf, 65504.0),
        (lambda x: x * 1, 70000.0, math.inf, 65504.0),
        (lambda x: x * 1, math.nan, math.nan, 0.0),
    ],
)
def test_saturation_and_infinity(
    function: Callable[[Tensor], Tensor], x: float, ieee: float, saturated: float
) -> None:
    """The documents' own examples: a 910A clamps and hides NaN, a 910B has infinities."""
    for card in ("ieee", "910b"):
        assert on(card, "fp16", function, torch.tensor([x])) == pytest.approx([ieee], nan_ok=True)
    for card in ("910a", "310p"):
        assert on(card, "fp16", function, torch.tensor([x])) == [saturated]


def test_fp32_is_stored_but_not_multiplied_on_a_910a() -> None:
    """Operands lose bits and range in the matrix unit; results and other operators are FP32."""
    fine, beyond = 1 + 2.0**-13, 1e6
    eye = torch.eye(2)
    for x, on_910a in ((fine, 1.0), (beyond, 65504.0), (-math.inf, -65504.0), (math.nan, 0.0)):
        assert on("910a", "fp32", lambda x: x @ eye[:1, :1], torch.tensor([[x]])) == [on_910a]
        assert on("910b", "fp32", lambda x: x @ eye[:1, :1], torch.tensor([[x]])) == pytest.approx(
            [x], nan_ok=True
        )
    # 65504 + 65504 and 1 + 2^-13: sums of what FP16 holds, which it does not hold.
    assert on("910a", "fp32", lambda x: x @ torch.ones(2, 1), torch.full((1, 2), 65504.0)) == [131008.0]
    assert on("910a", "fp32", lambda x: x @ torch.ones(2, 1), torch.tensor([[1.0, 2.0**-13]])) == [fine]
    assert on("910a", "fp32", lambda x: x * 1, torch.tensor([fine, beyond])) == [
        torch.tensor(fine).item(),
        beyond,
    ]


def test_convolutions_and_average_pooling_on_a_910a() -> None:
    """Both take FP16 operands; maximum pooling and the bias do not."""
    fine = 1 + 2.0**-13
    image = torch.full((1, 1, 2, 2), fine)
    conv = nn.Conv2d(1, 1, 1)
    conv.weight, conv.bias = (
        nn.Parameter(torch.full(shape, value), False) for shape, value in (((1, 1, 1, 1), 1.0), ((1,), fine))
    )
    assert on("910a", "fp32", conv, image) == [1 + fine] * 4
    assert on("910a", "fp32", nn.AvgPool2d(2), image) == [1.0]
    assert on("910a", "fp32", lambda x: functional.avg_pool1d(x[0], 2), image) == [1.0] * 2
    assert on("910a", "fp32", nn.MaxPool2d(2), image) == [fine]


def test_hf32_on_a_910b() -> None:
    """The hf32 tier rounds operands of products and convolutions, not their range, not the rest."""
    fine, beyond = 1 + 2.0**-13, 1e6 + 1
    conv = nn.Conv2d(1, 1, 1, bias=False)
    conv.weight = nn.Parameter(torch.ones(1, 1, 1, 1), False)
    x = torch.tensor([[[[fine, beyond]]]])
    short = [1.0, 999936.0]
    assert on("910b", "hf32", conv, x) == short
    assert on("910b", "hf32", lambda x: x.view(2, 1) @ torch.ones(1, 1), x) == short
    assert on("910b", "hf32", lambda x: x * 1, x) == [fine, beyond]
    assert on("910b", "hf32", nn.AvgPool2d((1, 1)), x) == [fine, beyond]
    assert on("910b", "fp32", conv, x) == [fine, beyond]


def test_kept_modules_of_mixed_use_the_cards_matrix_unit() -> None:
    """On a 910A an output layer kept in FP32 multiplies in FP16, yet is not clamped or rounded."""
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(torch.tensor([[1 + 2.0**-13]]), False)
    module = nn.Sequential(nn.Identity(), head)
    x = torch.tensor([[60000.0]])
    assert on("910a", "mixed", module, x) == [60000.0]
    assert on("910b", "mixed", module, x) == [pytest.approx(60007.32)]
    # What follows the output layer stays FP32 as well.
    assert on("910a", "mixed", nn.Sequential(nn.Identity(), head, nn.ReLU()), x) == [60000.0]


def test_autocast_on_a_910a() -> None:
    """The lowered operators saturate; the FP32 list does not."""
    square = Of(lambda x: (x @ torch.full((1, 1), 100.0)).pow(2))
    assert on("910a", "autocast", square, torch.tensor([[1000.0]])) == [65504.0**2]
    assert on("910b", "autocast", square, torch.tensor([[1000.0]])) == [math.inf]


def test_attention_is_two_products_on_a_910a() -> None:
    """The fused operator is taken apart, so that its second product has FP16 operands too."""
    query, value = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    weights = torch.softmax(query.half().float() @ query.half().float().mT / math.sqrt(8), -1)
    expected = weights.half().float() @ value.half().float()
    got = on("910a", "fp32", lambda x: functional.scaled_dot_product_attention(x, x, value), query)
    assert torch.allclose(torch.tensor(got), expected.flatten(), atol=2e-3)
    exact = functional.scaled_dot_product_attention(query, query, value).flatten()
    assert not torch.allclose(torch.tensor(got), exact, atol=1e-6)


@pytest.mark.parametrize("kind", ["fp16", "autocast"])
def test_attention_of_16_bits_on_a_910a(kind: Kind) -> None:
    """No fused kernel: the weights are rounded for the second product, the scores are not."""
    query, value = torch.randn(2, 1, 1, 64, 8).half().float().unbind()

    def attend(scale: float) -> Of:
        return Of(lambda x: functional.scaled_dot_product_attention(x, x, value, scale=scale))

    weights = torch.softmax(query @ query.mT, -1)
    expected = (weights.half().float() @ value).half().float().flatten()
    fused = (weights @ value).half().float().flatten()
    got, on_a_910b = (torch.tensor(on(card, kind, attend(1.0), query)) for card in ("910a", "910b"))
    # Up to the order of summation before the last rounding.
    assert float((got == expected).float().mean()) > 0.98 > float((fused == expected).float().mean())
    assert float((on_a_910b == fused).float().mean()) > 0.98
    # Scores beyond FP16's range: each token attends to itself alone, or to one more alike.
    scores = 1e5 * query @ query.mT
    assert scores.abs().max() > 65504
    best = value[0, 0, scores[0, 0].argmax(-1)].flatten()
    assert on("910a", kind, attend(1e5), query) == best.tolist()


def test_weights_saturate_too() -> None:
    """The cast happens on the card: a mask of -inf holds -65504 there."""
    module = Of(lambda x: x)
    module.register_buffer("mask", torch.tensor([-math.inf, math.nan, 1.0]))
    for card, mask in (("910a", [-65504.0, 0.0, 1.0]), ("910b", [-math.inf, math.nan, 1.0])):
        tier = convert(module, PrecisionSpec("fp16"), open_device("cpu", 1, card))
        assert tier.module.mask.tolist() == pytest.approx(mask, nan_ok=True)


def test_unknown_card() -> None:
    """A misspelt card is refused with the list."""
    with pytest.raises(ConfigError, match=r"'910c' is no card; the cards are ieee, 910a, 910b, 310p"):
        find_card("910c")
    assert all(find_card(name).name == name for name in CARDS)
