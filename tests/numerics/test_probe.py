"""The probe names the arithmetic that runs, not the one that was asked for."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from serving.numerics.conversion import convert
from serving.numerics.devices import Device
from serving.numerics.precision import Kind, PrecisionSpec
from serving.numerics.probe import attest, effective_precision, expected

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
    ],
)
def test_every_kind_is_what_it_says(
    *, device: Device, kind: Kind, native: bool, effective: str, bits: int, overflow: str
) -> None:
    """Each tier of this version, with the facts measured."""
    spec = PrecisionSpec(kind, native=native)
    found = attest(spec, device)
    assert (found.effective, found.overflow, found.subnormals) == (effective, overflow, True)
    assert found.matmul_mantissa_bits == found.conv_mantissa_bits == found.mantissa_bits == bits
    assert found.effective in expected(spec, device)


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


def to_tf32(tensor: Tensor) -> Tensor:
    """TF32's values: FP32 with 13 bits fewer, to nearest."""
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("layer", [nn.Linear, nn.Conv2d])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("spoil", "effective"), [(to_bf16, "bf16"), (to_tf32, "tf32")])
def test_quiet_loss_is_found(
    device: Device, layer: type[nn.Module], weights: bool, spoil: Callable[[Tensor], Tensor], effective: str
) -> None:
    """Negative control: one operator, or its weights alone, below FP32 betrays the tier."""
    found = effective_precision(spoiled(device, layer, spoil, weights), device)
    assert found.effective == effective
    assert found.effective not in expected(FP32, device)


def test_saturation_is_told_from_infinity(device: Device) -> None:
    """A card that clamps to 65504 is named for it."""

    def saturate(tensor: Tensor) -> Tensor:
        return tensor.clamp(-65504, 65504).half().float()

    found = effective_precision(spoiled(device, nn.Linear, saturate), device)
    assert (found.effective, found.overflow) == ("fp16-saturating", "saturates")


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
    assert attest(FP32, device).effective == ("bf16" if used else "fp32-ieee")
