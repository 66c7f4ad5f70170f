"""Operators that depart from the tier's promise are found, named and refused; honest ones are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serving.errors import PrecisionUnavailable
from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.operator_audit import Departure, admit_model, departures, name_with
from serving.numerics.precision import Kind, PrecisionSpec

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
EVERY_KIND: list[tuple[Kind, bool, str]] = [
    ("fp32", False, "ieee"), ("fp16", False, "ieee"), ("fp16", True, "ieee"), ("bf16", False, "ieee"),
    ("bf16", True, "ieee"), ("mixed", False, "ieee"), ("mixed", True, "ieee"), ("autocast", False, "ieee"),
    ("autocast", True, "ieee"), ("layercast", False, "ieee"), ("hf32", False, "910b"),
    ("fp16", False, "910a"), ("mixed", False, "910a"), ("autocast", False, "910a"),
]  # fmt: skip


class Narrowed(nn.Module):
    """A layer that user code left at 16 bits, with casts inside its forward: nothing raises."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = [nn.Linear(16, 16).to(dtype).requires_grad_(False)]
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """X [rows, 16] -> the same shape and dtype."""
        return self.layers[0](x.to(self.dtype)).to(x.dtype)


class Unregistered(nn.Module):
    """A layer in a plain list, which no conversion sees: it stays FP32."""

    def __init__(self, *, casts: bool) -> None:
        super().__init__()
        self.layers = [nn.Linear(16, 16).requires_grad_(False)]
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        """X [rows, 16] -> the same shape and dtype."""
        return self.layers[0](x.float()).to(x.dtype) if self.casts else self.layers[0](x)


class Calls(nn.Module):
    """A function of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The function's."""
        return self.function(x)


def around(odd: nn.Module) -> nn.Sequential:
    """A network with a module in its midst."""
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), odd, nn.ReLU(), nn.Linear(16, 4)).eval()


def found_in(module: nn.Module, kind: Kind, *, native: bool = False, card: str = "ieee") -> list[Departure]:
    """What the audit of a tier of the module finds."""
    spec = PrecisionSpec(kind, native=native)
    return list(departures(convert(module, spec, open_device("cpu", 1, card), [X]), [X]))


@pytest.mark.parametrize(("kind", "native", "card"), EVERY_KIND)
def test_honest_models_depart_in_nothing(kind: Kind, native: bool, card: str) -> None:
    """Layers of every sort, with kept modules, borders, constants and views."""
    attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(
        around(nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4))),
        nn.Flatten(1),
    )
    model[0][3] = nn.Sequential(nn.Flatten(1), Calls(lambda x: x * 0.1 + torch.arange(16)), nn.Softmax(-1))
    assert found_in(model.eval(), kind, native=native, card=card) == []
    tokens = nn.Sequential(
        nn.Linear(16, 16), nn.Unflatten(1, (1, 16)), attention, nn.Flatten(1), nn.Linear(16, 4)
    )
    assert found_in(tokens.eval(), kind, native=native, card=card) == []


@pytest.mark.parametrize("kind", ["fp32", "layercast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_module_silently_lowered_in_an_fp32_tier_is_found(kind: Kind, dtype: torch.dtype) -> None:
    """Negative control: its inputs and outputs are FP32, its parameters hidden, the probe content."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    found = found_in(around(Narrowed(dtype)), kind)
    assert {(d.module, d.computes_in, d.material) for d in found} == {("2", name, True)}
    assert {"aten::linear"} < {d.operator for d in found}
    with pytest.raises(
        PrecisionUnavailable, match=rf"computes fp32-ieee, but .*module 2 runs aten::to in {name}"
    ):
        admit_model("fp32-ieee", found)
    assert admit_model("fp32-ieee", found, accept_degraded=True) == f"fp32-ieee-with-{name}"


@pytest.mark.parametrize(
    "lower",
    [
        lambda x: x.half().float(),
        lambda x: (x.bfloat16() @ torch.ones(16, 16, dtype=torch.bfloat16)).float(),
        lambda x: torch.empty(x.shape, dtype=torch.float16).copy_(x).float(),
        lambda x: torch.autocast("cpu", torch.bfloat16)(nn.functional.linear)(x, torch.eye(16)).float(),
    ],
    ids=["cast and back", "product", "copy", "autocast"],
)
def test_lowering_within_a_forward_is_found(lower: Callable[[Tensor], Tensor]) -> None:
    """Negative control: casts alone, products, writes, and an autocast of the model's own."""
    assert {d.module for d in found_in(around(Calls(lower)), "fp32")} == {"2"}


def test_a_half_buffer_that_is_widened_is_no_departure() -> None:
    """A table stored at 16 bits to save memory loses nothing when it is looked up and widened."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(16).half())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table.view(1, 16)[:, :].float()

    assert found_in(around(Table()), "fp32") == []


def test_kept_modules_are_held_to_fp32() -> None:
    """Negative control: `mixed` promises FP32 inside the modules it keeps."""
    model = around(Narrowed(torch.float16))
    for native in (False, True):
        spec = PrecisionSpec("mixed", native=native, keep_fp32=("2",))
        found = departures(convert(model, spec, open_device("cpu", 1), [X]), [X])
        assert {(d.module, d.computes_in) for d in found} == {("2", "fp16")}
        # Outside them FP16 is what was promised.
        outside = PrecisionSpec("mixed", native=native, keep_fp32=("0",))
        assert departures(convert(model, outside, open_device("cpu", 1), [X]), [X]) == ()


@pytest.mark.parametrize(
    ("kind", "native", "casts"),
    [("fp16", False, False), ("fp16", True, True), ("bf16", False, False), ("mixed", True, True)],
)
def test_a_module_silently_left_in_fp32_is_found(kind: Kind, native: bool, casts: bool) -> None:
    """Negative control: a layer that conversion did not see computes its product in FP32."""
    found = found_in(around(Unregistered(casts=casts)), kind, native=native)
    assert [str(d) for d in found] == ["module 2 runs aten::linear in fp32"]
    with pytest.raises(PrecisionUnavailable, match="module 2 runs aten::linear in fp32"):
        admit_model("fp16", found)
    assert admit_model("fp16", found, accept_degraded=True) == "fp16-with-fp32"


def test_autocast_that_the_model_switches_off_is_found() -> None:
    """Negative control: its products then run in FP32."""
    off = Calls(
        lambda x: torch.autocast("cpu", enabled=False)(nn.functional.linear)(x.float(), torch.eye(16))
    )
    assert {str(d) for d in found_in(around(off), "autocast", native=True)} == {
        "module 2 runs aten::linear in fp32"
    }


def test_a_normalisation_widened_on_purpose_is_reported_only() -> None:
    """As `LlamaRMSNorm` does: not a product, so the tier is still what it says."""

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    found = found_in(around(Calls(norm)), "fp16", native=True)
    assert found
    assert not any(d.material for d in found)
    assert admit_model("fp16", found) == name_with("fp16", found) == "fp16"


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_another_16_bit_format_is_found(kind: Kind) -> None:
    """Negative control: BF16 within FP16, FP16 within BF16."""
    other = torch.bfloat16 if kind == "fp16" else torch.float16
    assert found_in(around(Narrowed(other)), kind)
    own = torch.float16 if kind == "fp16" else torch.bfloat16
    assert found_in(around(Narrowed(own)), kind) == []


def test_the_message_stays_short(device: Device) -> None:
    """Three departures are shown, the others counted."""
    found = found_in(nn.Sequential(*(Narrowed(torch.float16) for _ in range(4))), "fp32")
    with pytest.raises(PrecisionUnavailable, match=r"module 0 runs .*; module 0 runs .*; and \d+ more$"):
        admit_model("fp32-ieee", found)


def test_an_audit_leaves_nothing_behind(device: Device) -> None:
    """The same answers afterwards, no hooks, and the names of calls right also after one that raises."""
    model = around(nn.Identity())
    tier = convert(model, PrecisionSpec("fp16"), device, [X])
    before = tier(X)
    assert departures(tier, [X]) == ()
    with pytest.raises(RuntimeError):
        departures(tier, [X[:, :3]])
    assert torch.equal(before, tier(X))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tier.module.modules())


class Custom(torch.autograd.Function):
    """An operator of somebody's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Half as wide inside."""
        return x.half().float()


def test_autograd_functions_are_looked_into() -> None:
    """They hide nothing from the audit."""
    assert {d.computes_in for d in found_in(around(Calls(Custom.apply)), "fp32")} == {"fp16"}
