"""Counting what a cast loses."""

import math

import pytest
import torch

from serving.numerics.weight_loss import weight_loss


def test_counts_infinities_and_zeros() -> None:
    """Overflow and flush are counted apart, with the largest magnitude."""
    loss = weight_loss("w", torch.tensor([[1.0, -7e4], [1e-9, 0.0]]), torch.float16)
    assert loss is not None
    assert (loss.to_inf, loss.to_zero, loss.nonzero, loss.total, loss.largest) == (1, 1, 3, 4, 7e4)
    assert loss.material
    assert "w: of 4 values 1 become infinite and 1 of 3 non-zero ones become zero" in str(loss)


def test_values_that_are_infinite_already_are_not_lost() -> None:
    """A mask of -inf or a NaN is the same after the cast."""
    assert weight_loss("mask", torch.tensor([-math.inf, math.nan, 1.0]), torch.float16) is None


@pytest.mark.parametrize(("zeroed", "material"), [(1, False), (10, False), (11, True)])
def test_one_percent_is_the_limit(zeroed: int, material: bool) -> None:
    """Up to 1 % of the non-zero elements may become zero; each is reported."""
    weight = torch.ones(1000)
    weight[:zeroed] = 1e-9
    loss = weight_loss("w", weight, torch.float16)
    assert loss is not None
    assert loss.to_zero == zeroed
    assert loss.material is material


def test_integers_and_empty_tensors_lose_nothing() -> None:
    """Only floats are cast, and an empty one has nothing to lose."""
    assert weight_loss("n", torch.tensor([10**9]), torch.float16) is None
    assert weight_loss("e", torch.empty(0), torch.float16) is None


def test_bf16_has_fp32s_range() -> None:
    """What FP16 loses, BF16 keeps."""
    assert weight_loss("w", torch.tensor([1e6, 1e-30]), torch.bfloat16) is None
