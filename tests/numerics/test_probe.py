"""The probe names the arithmetic that runs, not the one that was asked for."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from serving.errors import DeviceLost, PrecisionUnavailable
from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.measure import _Attention, _Sum
from serving.numerics.precision import Kind, PrecisionSpec
from serving.numerics.probe import Attestation, admit, attest, effective_precision, expected
from serving.numerics.rounding import shortened

FP32 = PrecisionSpec("fp32")


@pytest.mark.parametrize(
    ("kind", "native", "effective", "bits", "overflow"),
    [
        ("fp32", False, "fp32-ieee", 24, "none"),
        ("fp16", False, "fp16-emulated", 11, "inf"),
        ("mixed", False, "fp16-emulated", 11, "inf"),
        ("bf16", False, "bf16-emulated", 8, "none"),
        ("fp16", True, "fp16", 11, "inf"),
        ("bf16", True, "bf16", 8, "none"),
        ("autocast", False, "fp16-emulated", 11, "inf"),
        ("autocast", True, "fp16", 11, "inf"),
        ("layercast", False, "fp32-ieee-fp16-weights", 24, "none"),
    ],
)
def test_every_kind_is_what_it_says(
    *, device: Device, kind: Kind, native: bool, effective: str, bits: int, overflow: str
) -> None:
    """Each kind on a CPU, with the facts measured."""
    spec = PrecisionSpec(kind, native=native)
    found = attest(spec, device)
    assert (found.effective, found.overflow, found.subnormals) == (effective, overflow, True)
    assert found.matmul_mantissa_bits == found.conv_mantissa_bits == found.mantissa_bits == bits
    assert found.attention_mantissa_bits == bits
    assert found.effective in expected(spec, device)
    assert admit(spec, device, found) == effective
    assert found.accumulation_bits == 24
    assert found.kept_mantissa_bits == (24 if kind == "mixed" else None)


def spoiled(
    device: Device, kind: type[nn.Module], spoil: Callable[[Tensor], Tensor], weights: bool = False
) -> Callable[[nn.Module], Callable[[Tensor], Tensor]]:
    """An FP32 tier of which one kind of layer quietly computes in something else."""

    def run(module: nn.Module) -> Callable[[Tensor], Tensor]:
        if isinstance(module, kind):
            if weights:
                module.weight = nn.Parameter(spoil(module.weight.detach()), requires_grad=False)
            else:
                module.register_forward_pre_hook(lambda called, args: (spoil(args[0]),))
        return convert(module, FP32, device)

    return run


def to_bf16(tensor: Tensor) -> Tensor:
    """BF16's values in FP32."""
    return tensor.bfloat16().float()


@pytest.mark.parametrize("layer", [nn.Linear, nn.Conv2d])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("spoil", "operands", "of_weights"),
    [
        (to_bf16, "fp32-storage-bf16-cube", "fp32-ieee-bf16-weights"),
        (shortened, "tf32", "fp32-ieee-fp16-weights"),
    ],
)
def test_quiet_loss_is_found(
    *,
    device: Device,
    layer: type[nn.Module],
    weights: bool,
    spoil: Callable[[Tensor], Tensor],
    operands: str,
    of_weights: str,
) -> None:
    """Negative control: one operator, or its weights alone, below FP32 betrays the tier."""
    found = effective_precision(spoiled(device, layer, spoil, weights), device)
    assert found.effective == (of_weights if weights else operands)
    assert {found.matmul, found.conv} == {found.effective, "fp32-ieee"}
    assert found.effective not in expected(FP32, device)


def lowered_attention(device: Device, spoil: Callable[[Tensor], Tensor], operands: slice) -> Attestation:
    """What an FP32 tier measures whose fused attention takes some of its operands with fewer bits."""

    def run(module: nn.Module) -> Callable[[Tensor], Tensor]:
        if isinstance(module, _Attention):

            def lower(called: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
                x = args[0].clone()
                x[operands] = spoil(x[operands])
                return (x,)

            module.register_forward_pre_hook(lower)
        return convert(module, FP32, device)

    return effective_precision(run, device)


@pytest.mark.parametrize("operands", [slice(0, 1), slice(2, 3), slice(0, 3)], ids=["query", "value", "all"])
@pytest.mark.parametrize(
    ("spoil", "name", "bits"), [(to_bf16, "fp32-storage-bf16-cube", 8), (shortened, "tf32", 11)]
)
def test_a_lowered_attention_beside_exact_products_is_found(
    *, device: Device, operands: slice, spoil: Callable[[Tensor], Tensor], name: str, bits: int
) -> None:
    """Negative control: a fused kernel that no switch reaches, in its scores or in its values."""
    found = lowered_attention(device, spoil, operands)
    assert (found.matmul, found.conv, found.attention) == ("fp32-ieee", "fp32-ieee", name)
    assert (found.effective, found.attention_mantissa_bits) == (name, bits)
    with pytest.raises(PrecisionUnavailable, match=f"convolutions fp32-ieee, attention {name}\\)"):
        admit(FP32, device, found)


def test_saturation_is_told_from_infinity(device: Device) -> None:
    """A card that clamps to 65504 is named for it."""

    def saturate(tensor: Tensor) -> Tensor:
        return tensor.clamp(-65504, 65504).half().float()

    found = effective_precision(spoiled(device, nn.Linear, saturate), device)
    assert (found.effective, found.overflow) == ("fp32-storage-fp16-cube", "saturates")


def test_flushed_subnormals_are_seen(device: Device) -> None:
    """Flushing 2^-24 to zero is a fact of the attestation."""

    def flush(tensor: Tensor) -> Tensor:
        return torch.where(tensor.abs() < 2.0**-14, 0.0, tensor)

    assert not effective_precision(spoiled(device, nn.Linear, flush), device).subnormals


@pytest.fixture
def medium_matmul() -> Iterator[None]:
    """The permission to compute FP32 matrix products in BF16."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.usefixtures("medium_matmul")
def test_permission_is_not_arithmetic(device: Device) -> None:
    """The probe reports BF16 exactly where the processor makes use of the permission."""
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    exact = a.double() @ b.double().t()
    error = float((nn.functional.linear(a, b) - exact).norm() / exact.norm())
    used = error > 1e-4
    assert attest(FP32, device).effective == ("fp32-storage-bf16-cube" if used else "fp32-ieee")


@pytest.mark.parametrize(
    ("card", "kind", "effective"),
    [
        ("910b", "fp32", "fp32-ieee"),
        ("910b", "hf32", "hf32-emulated"),
        ("910b", "fp16", "fp16-emulated"),
        ("910b", "mixed", "fp16-emulated"),
        ("910b", "autocast", "fp16-emulated"),
        ("910b", "bf16", "bf16-emulated"),
        ("910b", "layercast", "fp32-ieee-fp16-weights"),
        ("910a", "fp16", "fp16-saturating-emulated"),
        ("910a", "mixed", "fp16-saturating-emulated"),
        ("910a", "autocast", "fp16-saturating-emulated"),
        ("310p", "fp16", "fp16-saturating-emulated"),
    ],
)
def test_cards_serve_under_their_arithmetic(card: str, kind: Kind, effective: str) -> None:
    """What a rehearsed card honours is admitted under the name that was measured."""
    device, spec = open_device("cpu", 1, card), PrecisionSpec(kind)
    assert admit(spec, device, attest(spec, device)) == effective


@pytest.mark.parametrize("card", ["910a", "310p"])
@pytest.mark.parametrize("kind", ["fp32", "layercast"])
def test_fp32_over_an_fp16_cube_is_served_only_on_request(card: str, kind: Kind) -> None:
    """Refused with what was asked, what was measured and why; accepted under its true name."""
    device, spec = open_device("cpu", 1, card), PrecisionSpec(kind)
    found = attest(spec, device)
    assert found.effective == "fp32-storage-fp16-cube-emulated"
    assert (found.overflow, found.vector_mantissa_bits) == ("saturates", 24)
    assert found.effective not in expected(spec, device)
    with pytest.raises(PrecisionUnavailable) as raised:
        admit(spec, device, found)
    message = str(raised.value)
    assert message.startswith(f"{kind} was asked for on ")
    assert f"rehearsing a {card}" in message
    assert "measured fp32-storage-fp16-cube-emulated" in message
    assert "FP16 only" in message
    assert admit(spec, device, found, accept_degraded=True) == found.effective


def test_refused_kinds_are_not_admitted(device: Device) -> None:
    """Whatever was measured, HF32 is not served on a CPU, and nor is an arithmetic without a name."""
    found = attest(FP32, device)
    with pytest.raises(PrecisionUnavailable, match="needs a rehearsed one"):
        admit(PrecisionSpec("hf32"), device, found, accept_degraded=True)
    strange = replace(found, effective="unknown-5-bit")
    with pytest.raises(PrecisionUnavailable, match="unknown-5-bit"):
        admit(FP32, device, strange, accept_degraded=True)


def test_layercast_is_not_fp32(device: Device) -> None:
    """Its weights betray it, though all its arithmetic is FP32."""
    found = attest(PrecisionSpec("layercast"), device)
    assert (found.weight_mantissa_bits, found.mantissa_bits, found.vector_mantissa_bits) == (11, 24, 24)
    with pytest.raises(PrecisionUnavailable, match="fp32-ieee-fp16-weights"):
        admit(FP32, device, found)
    found = attest(PrecisionSpec("layercast", weights="bf16"), device)
    assert found.effective == "fp32-ieee-bf16-weights"


def test_hf32_convolution_beside_an_exact_product() -> None:
    """Ascend's default: the verdicts are apart, and the whole is hf32, which no fp32 tier may be."""
    device = open_device("cpu", 1, "910b")
    found = effective_precision(spoiled(device, nn.Conv2d, shortened), device)
    assert (found.matmul, found.conv, found.effective) == ("fp32-ieee", "hf32", "hf32")
    with pytest.raises(PrecisionUnavailable, match=r"matrix products fp32-ieee, convolutions hf32"):
        admit(FP32, device, found)


class Lowered(nn.Module):
    """A module whose operands quietly lose what `spoil` takes from them."""

    def __init__(self, module: nn.Module, spoil: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.spoil = spoil

    def forward(self, x: Tensor) -> Tensor:
        """The module of the spoilt X."""
        return self.module(self.spoil(x))


KINDS_ON_CARDS: list[tuple[Kind, str]] = [
    ("fp32", "ieee"), ("fp16", "ieee"), ("mixed", "ieee"), ("bf16", "ieee"), ("autocast", "ieee"),
    ("layercast", "ieee"), ("hf32", "910b"), ("fp16", "910a"), ("autocast", "910a"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "card"), KINDS_ON_CARDS)
def test_every_kind_that_is_quietly_lowered_is_found(kind: Kind, card: str) -> None:
    """Negative control: operands with 6 bits fewer than the kind's are betrayed."""
    device, spec = open_device("cpu", 1, card), PrecisionSpec(kind)
    true = attest(spec, device)
    kept_bits = true.mantissa_bits - 6

    def spoil(tensor: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(tensor)
        return torch.ldexp((fraction * 2**kept_bits).round() / 2**kept_bits, exponent)

    bare = replace(spec, keep_fp32=())
    found = effective_precision(
        lambda module: convert(Lowered(module, spoil), bare, device),
        device,
        emulated=spec.emulated_on(device.kind, device.card),
    )
    assert found.mantissa_bits < true.mantissa_bits
    with pytest.raises(PrecisionUnavailable, match=f"^{kind} was asked for"):
        admit(spec, device, found)


def test_autocast_without_its_fp32_list_is_found(device: Device) -> None:
    """Negative control: a tier that runs everything at FP16 measures fp16, but is no autocast."""
    found = attest(PrecisionSpec("fp16"), device)
    assert found.vector_mantissa_bits == 11
    with pytest.raises(PrecisionUnavailable, match="FP32 operators keep 11 bits of 24"):
        admit(PrecisionSpec("autocast"), device, found)


def test_mixed_whose_kept_modules_are_lowered_is_found(device: Device) -> None:
    """Negative control: the FP32 modules of `mixed` are FP32, except where the card has none."""
    spec = PrecisionSpec("mixed")
    found = replace(attest(spec, device), kept_mantissa_bits=11)
    with pytest.raises(PrecisionUnavailable, match="FP32 modules keep 11 bits of 24"):
        admit(spec, device, found)
    old = open_device("cpu", 1, "910a")
    on_910a = attest(spec, old)
    assert on_910a.kept_mantissa_bits == 11
    assert admit(spec, old, on_910a) == "fp16-saturating-emulated"


def test_fp32_with_a_lowered_vector_unit_is_found(device: Device) -> None:
    """Negative control: exact products beside sums of FP16 are no FP32."""

    class Half(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x.half().float() if isinstance(self.module, _Sum) else x)

    found = effective_precision(lambda module: convert(Half(module), FP32, device), device)
    assert (found.matmul, found.conv, found.effective) == ("fp32-ieee", "fp32-ieee", "fp16-vector")


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_narrow_accumulators_are_found(device: Device, dtype: torch.dtype, bits: int) -> None:
    """Negative control: a product summed term by term in 16 bits stops at 2048, or at 256."""

    class Sequential(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(x.shape[0], self.linear.out_features)
            for term in range(x.shape[1]):
                total = (total + x[:, term, None] * self.linear.weight[:, term]).to(dtype).float()
            return total

    def run(module: nn.Module) -> Callable[[Tensor], Tensor]:
        long = isinstance(module, nn.Linear) and module.in_features > 64
        return convert(Sequential(module) if long else module, PrecisionSpec("fp16"), device)

    found = effective_precision(run, device)
    assert found.accumulation_bits <= bits
    assert found.effective == f"fp16-{found.accumulation_bits}-bit-accumulation"


def test_a_card_that_raises_instead_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real 910A fails in FP32 products when told to keep to them: a refusal in the card's own words."""
    old = open_device("cpu", 1, "910a")
    said = RuntimeError("The soc version does not support bf16 / fp32 for calculations.\n[ERROR] at frame 0")
    lost = DeviceLost("the device failed")
    lost.__cause__ = said

    def fail(error: Exception) -> None:
        def convert(*args: object) -> None:
            raise error

        monkeypatch.setattr("serving.numerics.probe.convert", convert)

    for error in (said, lost):
        fail(error)
        with pytest.raises(
            PrecisionUnavailable,
            match=r"failed there \(The soc version does not support bf16 / fp32 for calculations\)\. The",
        ) as raised:
            attest(FP32, old)
        assert "frame" not in str(raised.value)
    fail(said)
    with pytest.raises(RuntimeError, match="soc version"):
        attest(FP32, device)
