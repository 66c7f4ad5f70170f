"""Emulated autocast lowers, widens and promotes as `torch.autocast` does."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from serving.numerics.autocast import AutocastOperators, is_narrow
from serving.numerics.conversion import convert
from serving.numerics.devices import Device
from serving.numerics.emulation import Islands
from serving.numerics.precision import PrecisionSpec

FINE = 1 + 2.0**-13
X = torch.tensor([[FINE, -2.5, 3.0, 0.1], [0.7, 1.5, -0.3, 2.2]])
SQUARE = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(2))
KERNEL = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(3))


def emulate(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """`function` of `args` under the emulation."""
    with torch.inference_mode(), AutocastOperators(torch.float16, Islands()):
        return function(*args)


def half(x: Tensor) -> Tensor:
    """A 16-bit tensor, by a product with the identity: lowered in both ways of running."""
    return x @ torch.eye(x.shape[-1])


#: Operators on which the CPU's own lists and those of GPUs and NPUs agree.
ALIKE: dict[str, Callable[[], Tensor]] = {
    "matmul": lambda: X @ SQUARE,
    "linear": lambda: functional.linear(X, SQUARE, X[0]),
    "mm": lambda: torch.mm(X, SQUARE),
    "bmm": lambda: torch.bmm(X[None], SQUARE[None]),
    "addmm": lambda: torch.addmm(X, X, SQUARE),
    "baddbmm": lambda: torch.baddbmm(X[None], X[None], SQUARE[None]),
    "einsum": lambda: torch.einsum("ij,jk->ik", X, SQUARE),
    "conv2d": lambda: functional.conv2d(IMAGE, KERNEL),
    "conv_transpose2d": lambda: functional.conv_transpose2d(IMAGE, KERNEL),
    "conv1d": lambda: functional.conv1d(IMAGE[0, :, 0][None], KERNEL[:, :, 0]),
    "attention": lambda: functional.scaled_dot_product_attention(*[X[None, None]] * 3),
    "prelu": lambda: functional.prelu(X, torch.tensor([0.3])),
    "add_fp32": lambda: X + X,
    "relu_of_half": lambda: half(X).relu(),
    "gelu_of_half": lambda: functional.gelu(half(X)),
    "scaled_half": lambda: half(X) * 0.1,
    "residual": lambda: half(X) + X,
    "two_halves": lambda: half(X) + half(X),
    "half_and_scalar_tensor": lambda: half(X) * torch.tensor(0.1),
    "cat_mixed": lambda: torch.cat([half(X), X]),
    "cat_halves": lambda: torch.cat([half(X), half(X)]),
    "stack_mixed": lambda: torch.stack([half(X), X]),
    "where_mixed": lambda: torch.where(X > 0, half(X), X),
    "where_half": lambda: torch.where(X > 0, half(X), half(X)),
    "masked_fill": lambda: half(X).masked_fill(X > 1, 0.1),
    "batch_norm": lambda: functional.batch_norm(half(X), torch.zeros(4), torch.ones(4), X[0], X[1]),
    "embedding": lambda: functional.embedding(torch.tensor([0]), X),
    "max_pool": lambda: functional.max_pool2d(functional.conv2d(IMAGE, KERNEL), 2),
    "mean_of_half": lambda: half(X).mean(),
    "view_of_half": lambda: half(X).t().reshape(2, 4)[:1],
    "half_upcast": lambda: half(X).float() * 0.1,
    "in_place_on_half": lambda: half(X).add_(X),
    "in_place_on_fp32": lambda: X.clone().add_(half(X)),
    "dropout": lambda: functional.dropout(half(X), training=False),
    "zeros_like": lambda: torch.zeros_like(half(X)) + 0.1,
    "type_as": lambda: X.type_as(half(X)),
    "pad": lambda: functional.pad(half(X), (1, 1), value=0.1),
    "chunk": lambda: half(X).chunk(2)[1] * 0.1,
}


@pytest.mark.parametrize("name", ALIKE)
def test_lowers_what_torch_lowers(name: str) -> None:
    """The same results are 16 bits wide under `torch.autocast("cpu")`, with nearly the same values."""
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        native = ALIKE[name]()
    emulated = emulate(ALIKE[name])
    assert is_narrow(emulated) == (native.dtype is torch.float16)
    assert emulated.dtype is torch.float32
    assert torch.allclose(emulated, native.float(), rtol=2e-3, atol=2e-3)
    if is_narrow(emulated):
        assert torch.equal(emulated, emulated.half().float())


def test_recurrent_cells_are_lowered() -> None:
    """As on GPUs and NPUs; the CPU's own list lacks them."""
    assert is_narrow(emulate(lambda: torch.gru_cell(X, X, *[SQUARE.repeat(3, 1)] * 2)))
    assert is_narrow(emulate(lambda: torch.lstm_cell(X, [X, X], *[SQUARE.repeat(4, 1)] * 2)[0]))


#: FP32 results of 16-bit operands on GPUs and NPUs; the CPU's own list is shorter.
FP32_LIST: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: x.abs().log(),
    "pow": lambda x: x.pow(3),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "softplus": functional.softplus,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": functional.normalize,
    "sum": lambda x: x.sum(-1),
    "prod": lambda x: x.prod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "mse_loss": lambda x: functional.mse_loss(x, x * 2),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", FP32_LIST)
def test_fp32_list(name: str) -> None:
    """Exactly FP32's result of the 16-bit operand, not rounded."""
    function = FP32_LIST[name]
    result = emulate(lambda: function(half(X)))
    assert not is_narrow(result)
    operand = X.half().float()
    assert torch.equal(result, function(operand))
    assert not torch.equal(result, result.half().float())


def test_weights_stay_fp32_and_are_not_written_to(device: Device) -> None:
    """Operands are rounded copies, of weights once."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    tier = convert(module, PrecisionSpec("autocast"), device, [X])
    x = X.clone()
    y = tier(x)
    assert torch.equal(tier(x), y)
    assert torch.equal(x, X)
    assert all(torch.equal(value, before[name]) for name, value in tier.module.state_dict().items())
    assert torch.equal(y, y.half().float())


def test_emulated_is_as_far_from_fp32_as_native(device: Device) -> None:
    """On a network of operators that both lower, the error has the same size."""
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
    x = torch.randn(64, 64)
    reference = module(x).detach()
    emulated, native = (
        float((convert(module, PrecisionSpec("autocast", native=n), device)(x) - reference).norm())
        for n in (False, True)
    )
    assert emulated > 0
    assert 0.5 < emulated / native < 2


def test_marks_die_with_their_tensor() -> None:
    """A new tensor at an old one's address is no 16-bit one."""

    def churn() -> Tensor:
        wide = []
        for _ in range(200):
            addresses = {id(half(X)) for _ in range(3)}
            fresh = X + 1
            wide.append((id(fresh) in addresses, is_narrow(fresh)))
        assert any(reused for reused, _ in wide)
        assert not any(narrow for _, narrow in wide)
        return X

    gc.collect()
    emulate(churn)


def test_marks_survive_while_only_torch_holds_the_tensor() -> None:
    """A tensor kept alive by another object alone is still known."""

    def hide() -> Tensor:
        holder = nn.Module()
        holder.register_buffer("held", half(X))
        # A view holds its base where Python does not.
        view = holder.held.t()
        del holder
        gc.collect()
        return view._base if view._base is not None else view

    assert is_narrow(emulate(hide))
    assert is_narrow(emulate(lambda: torch.atleast_2d(half(X)[0])))


@pytest.mark.parametrize("native", [False, True])
def test_kept_modules_compute_in_fp32(device: Device, native: bool) -> None:
    """A named module is left out of autocast, inputs and results FP32."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    tier = convert(module, PrecisionSpec("autocast", native=native, keep_fp32=("1",)), device, [X])
    seen: list[Tensor] = []
    tier.module[1].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    y = tier(X)
    assert tier.kept_fp32 == ("1",)
    assert not torch.equal(y, y.half().float())
    with torch.no_grad():
        assert torch.allclose(y, module[1](seen[0].float()))


def test_a_result_marked_in_one_pass_is_fp32_in_the_next(device: Device) -> None:
    """Outputs that come back as inputs are FP32 tensors like any other."""
    tier = convert(nn.Linear(4, 4), PrecisionSpec("autocast"), device)
    adding = convert(AddTenth(), PrecisionSpec("autocast"), device)
    y = adding(tier(X))
    assert not torch.equal(y, y.half().float())


class AddTenth(nn.Module):
    """Type promotion: 16 bits only if its input is."""

    def forward(self, x: Tensor) -> Tensor:
        """X + 0.1."""
        return x + 0.1
