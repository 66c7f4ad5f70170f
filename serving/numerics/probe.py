"""The effective precision of a tier, found by arithmetic.

Options say what was asked for; a probe says what was done. Tiny modules with known answers
are converted and run as the tier's own module is: an identity matrix product and a 3 x 3 delta
convolution return what they are given, as far as their arithmetic can hold it. 1 + 2^-k
survives where the significand has more than k bits: 24 in FP32, 11 in TF32, HF32 and FP16, 8 in
BF16 (the leading bit counted). What is beyond 65504 survives only where the range is FP32's.

The probe tells arithmetic apart, not its makers: whether 16-bit arithmetic is emulated is known
from the conversion and only added to the name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from serving.numerics.conversion import convert
from serving.numerics.devices.device import Device
from serving.numerics.precision import PrecisionSpec

Overflow = Literal["inf", "saturates", "none"]
#: A module -> the same as the tier would run it: takes one tensor, returns one.
Run = Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]

#: Square matrices and channels of the probes; large enough for the kernels of real models.
_WIDTH = 64
_FP32_FRACTION_BITS = 23
_FP16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Attestation:
    """What the probe measured, and its name."""

    #: `fp32-ieee`, `tf32`, `hf32`, `fp16`, `fp16-saturating`, `bf16`, with `-emulated` where
    #: so, or `unknown` with the bits.
    effective: str
    #: Significand bits that survive, leading bit counted: the fewest of activations and weights.
    matmul_mantissa_bits: int
    conv_mantissa_bits: int
    #: What 2 x 65504 and 1e6 become.
    overflow: Overflow
    #: Whether 2^-24, the smallest FP16 subnormal, survives.
    subnormals: bool

    @property
    def mantissa_bits(self) -> int:
        """The fewest bits of any probed operator."""
        return min(self.matmul_mantissa_bits, self.conv_mantissa_bits)


def attest(spec: PrecisionSpec, device: Device) -> Attestation:
    """Probe the arithmetic of a tier: what `convert` makes of a module with `spec` on `device`.

    For `mixed` it is that of the modules outside the kept ones, the least precise.
    """
    bare = replace(spec, keep_fp32=())
    return effective_precision(
        lambda module: convert(module, bare, device), device, emulated=spec.emulated_on(device.kind)
    )


def effective_precision(run: Run, device: Device, *, emulated: bool = False) -> Attestation:
    """Measure an arithmetic.

    Args:
        run: converts a module as the tier does.
        device: what the result runs on.
        emulated: whether `run` emulates 16 bits; goes into the name.
    """
    matmul_bits = _matmul_bits(run, device)
    conv_bits = _conv_bits(run, device)
    overflow = _overflow(run, device)
    name = _name(min(matmul_bits, conv_bits), overflow, device.kind)
    subnormal = torch.full((_WIDTH, _WIDTH), 2.0**-24)
    survives = bool((_matmul(run, device, torch.eye(_WIDTH), subnormal) == subnormal).all())
    return Attestation(f"{name}-emulated" if emulated else name, matmul_bits, conv_bits, overflow, survives)


def expected(spec: PrecisionSpec, device: Device) -> frozenset[str]:
    """The effective precisions with which a tier may serve under the name of its kind."""
    if spec.kind == "fp32":
        return frozenset({"fp32-ieee"})
    name = "bf16" if spec.kind == "bf16" else "fp16"
    if spec.emulated_on(device.kind):
        return frozenset({f"{name}-emulated"})
    saturates = device.kind == "npu" and name == "fp16"
    return frozenset({name, "fp16-saturating"}) if saturates else frozenset({name})


def _name(bits: int, overflow: Overflow, device_kind: str) -> str:
    eleven = "hf32" if device_kind == "npu" else "tf32"
    names: dict[tuple[int, Overflow], str] = {
        (24, "none"): "fp32-ieee",
        (11, "none"): eleven,
        (11, "inf"): "fp16",
        (11, "saturates"): "fp16-saturating",
        (8, "none"): "bf16",
    }
    return names.get((bits, overflow), f"unknown-{bits}-bit")


def _steps() -> torch.Tensor:
    """1 + 2^-k for k = 1..23, then ones: [_WIDTH]. Each needs k + 1 significand bits."""
    steps = torch.ones(_WIDTH)
    exponents = torch.arange(1, _FP32_FRACTION_BITS + 1, dtype=torch.float32)
    steps[:_FP32_FRACTION_BITS] += torch.exp2(-exponents)
    return steps


def _surviving_bits(results: torch.Tensor) -> int:
    """Significand bits of an arithmetic that made `results`, [_WIDTH, n], of `_steps`."""
    exact = (results == _steps()[:, None]).all(dim=1)[:_FP32_FRACTION_BITS]
    return 1 + int(exact.int().cumprod(0).sum())


def _matmul(run: Run, device: Device, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` @ `weight`ᵀ as the tier computes it, on the host."""
    linear = nn.Linear(_WIDTH, _WIDTH, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return run(linear)(x.to(device.torch_device)).cpu()


def _matmul_bits(run: Run, device: Device) -> int:
    steps = _steps()
    # Row k of the result is step k in every column, then step k on the diagonal.
    activations = _matmul(run, device, torch.eye(_WIDTH), steps[:, None].repeat(1, _WIDTH))
    weights = _matmul(run, device, torch.diag(steps), torch.eye(_WIDTH)).diagonal()[:, None]
    return min(_surviving_bits(activations), _surviving_bits(weights))


def _conv(run: Run, device: Device, centres: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each channel of `x` [channels, height, width] times its kernel's centre, on the host."""
    conv = nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False)
    weight = torch.zeros(_WIDTH, _WIDTH, 3, 3)
    weight[:, :, 1, 1] = torch.diag(centres)
    conv.weight = nn.Parameter(weight, requires_grad=False)
    return run(conv)(x[None].to(device.torch_device)).cpu()[0]


def _conv_bits(run: Run, device: Device) -> int:
    steps = _steps()
    ones = torch.ones(_WIDTH)
    image = torch.ones(_WIDTH, 8, 8)
    activations = _conv(run, device, ones, steps[:, None, None] * image).flatten(1)
    weights = _conv(run, device, steps, image).flatten(1)
    return min(_surviving_bits(activations), _surviving_bits(weights))


def _overflow(run: Run, device: Device) -> Overflow:
    large = torch.zeros(_WIDTH, _WIDTH)
    large.diagonal()[0::2] = 2 * _FP16_MAX
    large.diagonal()[1::2] = 1e6
    # Off the diagonal are zeros, so an infinity meets 0 x inf nowhere but in its own row.
    result = _matmul(run, device, torch.eye(_WIDTH), large).diagonal()
    if torch.isfinite(result).all():
        return "none" if bool((result > 1.5 * _FP16_MAX).all()) else "saturates"
    return "inf"
