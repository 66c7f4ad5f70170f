"""The overflow guard: the rows that a number format could not hold are flagged, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from serving.numerics.conversion import convert
from serving.numerics.devices import open_device
from serving.numerics.guard import FINE, NONFINITE, SATURATED, Guard, GuardMode, row_flags
from serving.numerics.precision import PrecisionSpec

BIG = 1000.0


class Squares(nn.Module):
    """x², then something that may hide an overflow."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x * x)


class SequenceFirst(nn.Module):
    """Its inner tensors have another dimension than the rows in front."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, steps] -> [steps, rows] -> [rows, steps]
        return torch.sigmoid((x.T * x.T).T)


class MaskedScores(nn.Module):
    """Scores with a fill value at the format's limit, then softmax: no overflow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, features]
        scores = x.masked_fill(x < 0, torch.finfo(torch.float16).min)
        return torch.softmax(scores + (x < 0).to(x.dtype) * -65504.0, dim=-1)


def flags_of(
    module: nn.Module,
    x: torch.Tensor,
    mode: GuardMode = "output",
    *,
    kind: Any = "fp16",
    card: str = "ieee",
    ignored: bool = False,
    **spec: Any,
) -> list[int]:
    """The flags of a batch's rows."""
    device = open_device("cpu", 1, card, tier=kind)
    tier = convert(module.eval(), PrecisionSpec(kind=kind, **spec), device, [x])
    guard = Guard(tier, mode, [ignored])
    guard.learn([[torch.cat([x, x[:1]])], [x]])
    *_, flags = guard.run([x], lambda returned: [returned])
    assert flags.dtype is torch.uint8
    return flags.tolist()


def rows(*values: float) -> torch.Tensor:
    """[rows, 3], each row with one value."""
    return torch.tensor(values).reshape(-1, 1).repeat(1, 3)


def identity(x: torch.Tensor) -> torch.Tensor:
    """Hides nothing."""
    return x


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("mode", ["output", "deep"])
def test_the_overflowing_row_alone_is_flagged(native: bool, mode: GuardMode) -> None:
    """Emulated or in torch's own half kernels."""
    assert flags_of(Squares(identity), rows(1, BIG, 2), mode, native=native) == [FINE, NONFINITE, FINE]


def test_a_saturating_card_is_not_believed() -> None:
    """Its largest value is finite, and says nothing of what it stands for."""
    assert flags_of(Squares(identity), rows(1, BIG), card="910a") == [FINE, SATURATED]


@pytest.mark.parametrize(
    "after", [torch.sigmoid, torch.tanh, lambda x: torch.softmax(x, -1), lambda x: 1 / (1 + x)]
)
@pytest.mark.parametrize("card", ["ieee", "910a"])
def test_what_hides_an_overflow_hides_it_from_the_output_only(
    after: Callable[[torch.Tensor], torch.Tensor], card: str
) -> None:
    """A deep guard sees the operator that overflowed."""
    found = flags_of(Squares(after), rows(1, BIG, 2), "deep", card=card)
    assert found == [FINE, SATURATED if card == "910a" else NONFINITE, FINE]
    if card == "910a":
        assert flags_of(Squares(after), rows(1, BIG, 2), card=card) == [FINE, FINE, FINE]


def test_what_an_overflow_turns_into_is_not_found_by_the_output() -> None:
    """The negative control of the deep guard."""
    assert flags_of(Squares(torch.sigmoid), rows(1, BIG)) == [FINE, FINE]


@pytest.mark.parametrize("mode", ["output", "deep"])
def test_a_fill_value_at_the_limit_overflows_nothing(mode: GuardMode) -> None:
    """Attention masks are full of them."""
    assert flags_of(MaskedScores(), torch.tensor([[1.0, -1.0, 2.0], [3.0, 4.0, -5.0]]), mode) == [FINE, FINE]


def test_rows_that_are_not_in_front_are_flagged_together() -> None:
    """They cannot be told apart; all are computed again."""
    assert flags_of(SequenceFirst(), rows(1, BIG, 2), "deep") == [NONFINITE] * 3
    assert flags_of(SequenceFirst(), rows(1, 3, 2), "deep") == [FINE] * 3


@pytest.mark.parametrize(("card", "cause"), [("ieee", NONFINITE), ("910a", SATURATED)])
def test_an_input_beyond_the_format_is_an_overflow(card: str, cause: int) -> None:
    """Even where nothing that follows shows it; what was infinite before the cast is none."""
    hides = Squares(lambda x: 1 / (1 + x))
    x = rows(1, 554_894.0, 65_504.0, torch.inf)
    x[2:] /= torch.tensor([[65_504.0], [1.0]])
    assert flags_of(hides, x, "deep", card=card) == [FINE, cause, FINE, FINE]
    # The range of BF16 is that of FP32.
    assert flags_of(Squares(identity), rows(1, 554_894.0), "deep", kind="bf16") == [FINE, FINE]


def test_fp32_outputs_may_exceed_what_16_bits_hold() -> None:
    """The output layer of a mixed tier is FP32."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2, bias=False)
            nn.init.constant_(self.head.weight, 1000.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)

    assert flags_of(Head(), rows(1, BIG), kind="mixed") == [FINE, FINE]
    assert flags_of(Head(), rows(1, BIG), "deep", kind="mixed") == [FINE, FINE]
    assert flags_of(Head(), rows(1, BIG), kind="fp16") == [FINE, NONFINITE]


def test_autocast_leaves_wide_results_alone() -> None:
    """A sum stays FP32 there; a product does not."""

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 50_000.0).sum(-1, keepdim=True)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(3, 3, bias=False)
            nn.init.constant_(self.product.weight, 1000.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.product(x)

    assert flags_of(Sum(), rows(1, 2), kind="autocast") == [FINE, FINE]
    assert flags_of(Product(), rows(1, BIG), kind="autocast") == [FINE, NONFINITE]


def test_bf16_has_the_range_of_fp32() -> None:
    """And flags what exceeds that."""
    assert flags_of(Squares(identity), rows(1, BIG, 1e30), kind="bf16") == [FINE, FINE, NONFINITE]


def test_an_output_that_may_hold_infinity_is_ignored() -> None:
    """A mask's, say."""
    assert flags_of(Squares(identity), rows(1, BIG), ignored=True) == [FINE, FINE]


def test_flags_of_rows() -> None:
    """NaN outweighs saturation within a row."""
    values = torch.tensor([[1.0, 2.0], [65504.0, 1.0], [65504.0, torch.nan], [-torch.inf, 0.0]])
    reached = ~(values.abs() < 65504)
    assert row_flags(values, reached).tolist() == [FINE, SATURATED, NONFINITE, NONFINITE]
