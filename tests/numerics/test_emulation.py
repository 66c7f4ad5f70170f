"""Emulated 16-bit arithmetic: every result representable, no argument damaged."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.numerics.emulation import Islands, RoundResults

X = torch.tensor([[1.0, -2.5, 1000.0, 0.0625], [3.0, 0.5, -7.0, 60000.0]])


def emulate(function: Callable[..., object], *args: Tensor, dtype: torch.dtype = torch.float16) -> object:
    """`function` of `args` under the emulation."""
    with torch.inference_mode(), RoundResults(dtype, Islands()):
        return function(*args)


def is_rounded(tensor: Tensor) -> bool:
    """Whether every element is an FP16 value; NaN counts."""
    return torch.equal(tensor.nan_to_num(0.5), tensor.half().float().nan_to_num(0.5))


COMPUTING: dict[str, Callable[[Tensor], Tensor]] = {
    "multiply": lambda x: x * 0.1,
    "sum": lambda x: x.sum(),
    "exp": lambda x: x.exp(),
    "linear": lambda x: functional.linear(x, X),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x / 3),
    "norm": functional.normalize,
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "softmax": lambda x: x.softmax(-1),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.1),
    "clamp": lambda x: x.clamp(min=0.1),
    "where_number": lambda x: torch.where(x > 1, x, -1e9),
    "where_constant": lambda x: torch.where(x > 1, x, torch.tensor(0.1)),
    "pad": lambda x: functional.pad(x, (1, 1), value=0.1),
    "full": lambda x: torch.full((2,), 0.1),
    "from_integers": lambda x: torch.full((3,), 4097).float(),
    "fill_": lambda x: torch.empty_like(x).fill_(0.1),
    "cat_integers": lambda x: torch.cat([x, torch.full((1, 4), 4097)]),
    "arange": lambda x: torch.arange(2047, 2052, dtype=torch.float32),
    "scatter_add": lambda x: x.scatter_add(1, torch.zeros(2, 4, dtype=torch.int64), x / 3),
    "index_put": lambda x: x.clone().index_put_((torch.tensor([0, 0]),), x / 3, accumulate=True),
    "out": lambda x: torch.mul(x, 0.1, out=torch.empty(2, 4)),
    "in_place": lambda x: x.clone().mul_(0.1),
    "in_place_view": lambda x: x.clone().t().mul_(0.1),
    "var_mean": lambda x: torch.var_mean(x)[0],
    "cosine": lambda x: functional.cosine_similarity(x, x / 3),
    "attention": lambda x: functional.scaled_dot_product_attention(*([x.view(1, 1, 2, 4)] * 3)),
}


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_are_rounded(name: str, dtype: torch.dtype) -> None:
    """Whatever computes, converts or brings in constants gives representable values."""
    x = X.to(dtype).float()
    before = x.clone()
    result = emulate(COMPUTING[name], x, dtype=dtype)
    assert isinstance(result, Tensor)
    assert torch.equal(result.nan_to_num(0.5), result.to(dtype).float().nan_to_num(0.5))
    assert torch.equal(x, before)


MOVING: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(8),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "dropout": lambda x: functional.dropout(x, training=False),
    "expand": lambda x: x[:, None].expand(2, 3, 4),
    "to": lambda x: x.to(torch.float32),
    "relu": functional.relu,
    "max": lambda x: x.max(dim=1).values,
    "cat": lambda x: torch.cat([x, x]),
    "embedding": lambda x: functional.embedding(torch.tensor([1, 0]), x),
    "relu6": functional.relu6,
}


@pytest.mark.parametrize("name", MOVING)
def test_moves_leave_values_alone(name: str) -> None:
    """What only moves or selects is passed through, and what aliases an argument is not written.

    The argument is given values that rounding would change, so a write would show.
    """
    x = X * 1.0001
    before = x.clone()
    result = emulate(MOVING[name], x)
    assert isinstance(result, Tensor)
    assert torch.equal(result, MOVING[name](before))
    assert torch.equal(x, before)


def test_in_place_rounds_what_it_wrote_only() -> None:
    """`add_` on a column rounds the column; the base's other elements stay."""
    base = torch.full((3, 2), 1.0001)
    emulate(lambda t: t[:, 0].add_(0.1), base)
    assert is_rounded(base[:, 0])
    assert (base[:, 1] == torch.tensor(1.0001)).all()


def test_overflow_is_infinite() -> None:
    """300 squared leaves FP16's range in an operator, as it does on a card."""
    assert emulate(lambda x: x * x, torch.tensor([300.0])) == torch.tensor([torch.inf])


def test_other_dtypes_are_left_alone() -> None:
    """Integers, bools and FP64 are no 16-bit floats."""
    assert emulate(lambda x: x.long() + 70001, torch.zeros(1)) == 70001
    double = emulate(lambda x: x.double() * 0.1, torch.ones(1))
    assert double == torch.tensor(0.1, dtype=torch.float64)


def test_island_is_not_rounded() -> None:
    """Inside a kept module the mode lets everything pass."""
    islands = Islands()
    islands.inside = True
    with torch.inference_mode(), RoundResults(torch.float16, islands):
        assert not is_rounded(X * 0.1)


def test_wide_tensors_spread() -> None:
    """What is computed from the output layer's result stays FP32, other results don't."""
    islands = Islands()
    wide = X * 1.0001
    islands.wide[id(wide)] = wide
    with torch.inference_mode(), RoundResults(torch.float16, islands):
        assert not is_rounded((wide.t() * 0.1).softmax(0))
        assert is_rounded(X * 0.1)


def test_linear_is_rounded_once() -> None:
    """A linear layer is one kernel: product and bias accumulate in FP32, then one rounding."""
    linear = nn.Linear(4, 4).requires_grad_(False)
    assert torch.equal(emulate(linear, X / 60000), linear(X / 60000).half().float())
