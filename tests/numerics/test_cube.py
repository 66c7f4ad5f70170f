"""The matrix unit's operands are rounded, in every operator that uses it, and nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.numerics.cube import Cube, Operand, ThroughCube

FINE = 1 + 2.0**-13
X = torch.full((2, 2), FINE)
IMAGE = torch.full((1, 1, 2, 2), FINE)
ONE = torch.ones(1, 1, 1, 1)


def through(operand: Operand, function: Callable[[], Tensor]) -> Tensor:
    """What the matrix unit makes of a function."""
    with torch.inference_mode(), ThroughCube(Cube(operand)):
        return function()


#: Each gives 1 x 1 + 1 x 1 = 2 from rounded operands, and more from exact ones.
PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "matmul": lambda: X @ X,
    "mm": lambda: torch.mm(X, X),
    "bmm": lambda: torch.bmm(X[None], X[None]),
    "baddbmm": lambda: torch.baddbmm(torch.zeros(1, 2, 2), X[None], X[None]),
    "addmm": lambda: torch.addmm(torch.zeros(2, 2), X, X),
    "in_place": lambda: torch.zeros(2, 2).addmm_(X, X),
    "mv": lambda: torch.mv(X, X[0]),
    "dot": lambda: torch.dot(X[0], X[0]),
    "linear": lambda: functional.linear(X, X),
    "einsum": lambda: torch.einsum("ij,jk->ik", X, X),
    "tensordot": lambda: torch.tensordot(X, X, 1),
    "inner": lambda: torch.inner(X, X),
    "multi_dot": lambda: torch.linalg.multi_dot([X, X]),
    "conv1d": lambda: functional.conv1d(X[None], X[None]),
    "conv2d": lambda: functional.conv2d(IMAGE, IMAGE[:, :, :1]),
    "conv3d": lambda: functional.conv3d(IMAGE[None], IMAGE[None, :, :, :1]),
    "conv_transpose2d": lambda: functional.conv_transpose2d(IMAGE, ONE * FINE) * 2,
}


@pytest.mark.parametrize("operand", ["fp16", "hf32"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_are_rounded(name: str, operand: Operand) -> None:
    """Also in composite operators, which are taken apart."""
    x = X.clone()
    assert (through(operand, PRODUCTS[name]) % 2 == 0).all()
    assert (PRODUCTS[name]() % 2 != 0).all()
    assert torch.equal(x, X)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "bias": lambda: functional.linear(X, torch.zeros(2, 2), X[0]),
    "addmm_bias": lambda: torch.addmm(X, torch.zeros(2, 2), X),
    "multiply": lambda: X * 1,
    "layer_norm": lambda: functional.layer_norm(X, (2,), X[0], X[0]),
    "batch_norm": lambda: functional.batch_norm(X, torch.zeros(2), torch.ones(2)),
    "max_pool": lambda: functional.max_pool2d(IMAGE, 2),
    "adaptive_pool": lambda: functional.adaptive_avg_pool2d(IMAGE, 1),
    "softmax": lambda: X.softmax(-1),
    "sum": X.sum,
}


@pytest.mark.parametrize("operand", ["fp16", "hf32"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_operators_are_exact(name: str, operand: Operand) -> None:
    """Biases are added at FP32, and what has no product is FP32."""
    assert torch.equal(through(operand, OTHERS[name]), OTHERS[name]())


def test_average_pooling_is_fp16s_alone() -> None:
    """Cards without FP32 products cast it too; HF32 has nothing to do with it."""
    pool = {
        "2d": lambda: functional.avg_pool2d(IMAGE, 2),
        "1d": lambda: functional.avg_pool1d(X, 2),
    }
    for function in pool.values():
        assert (through("fp16", function) == 1).all()
        assert (through("hf32", function) == FINE).all()


def test_a_weight_is_rounded_again_after_it_was_written_to() -> None:
    """The rounded copy of a weight is kept until then."""
    weight = nn.Parameter(torch.full((1, 1), FINE), requires_grad=False)
    one, cube = torch.ones(1, 1), Cube("fp16")
    results = []
    for value in (FINE, FINE, 3.0):
        weight.fill_(value)
        with torch.inference_mode(), ThroughCube(cube):
            results.append(float(functional.linear(one, weight)))
    assert results == [1, 1, 3]


def test_recurrent_layers_have_rounded_operands() -> None:
    """Inputs and weights of an LSTM are rounded; the state within the layer is a known gap."""
    lstm = nn.LSTM(4, 4, batch_first=True).requires_grad_(False)
    x = torch.randn(1, 3, 4)
    exact, rounded = lstm(x)[0], through("fp16", lambda: lstm(x)[0])
    assert 0 < float((exact - rounded).abs().max()) < 1e-2


MASK = torch.tensor([[True, True, False, True, False]])


@pytest.mark.parametrize("operand", ["fp16", "hf32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": MASK},
        {"attn_mask": torch.randn(5, 5)},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.zeros(5, 5, dtype=torch.bool)},
    ],
    ids=["plain", "bool-mask", "float-mask", "causal", "scale", "nothing-to-attend"],
)
def test_attention_is_near_the_fused_one(operand: Operand, options: dict[str, Any]) -> None:
    """Taken apart it masks and scales as the fused operator does."""
    query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
    exact = functional.scaled_dot_product_attention(query, key, value, **options)
    got = through(operand, lambda: functional.scaled_dot_product_attention(query, key, value, **options))
    assert torch.allclose(got, exact, atol=5e-3)
