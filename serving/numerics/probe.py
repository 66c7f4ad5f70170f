"""The effective precision of a tier, found by arithmetic, and whether it may serve under its name.

Options say what was asked for; a probe says what was done. Modules with known answers are
converted and run as the tier's own module is (`serving.numerics.measure`).

The probe tells arithmetic apart, not its makers: whether it is emulated, on a plain CPU or for a
rehearsed card, is known from the conversion and added to the name as ``-emulated``. An arithmetic
that is named after its maker (HF32 is Ascend's, TF32 NVIDIA's) takes the device's.

========================= =====================================================================
name                      matrix products, convolutions and attention
========================= =====================================================================
fp32-ieee                 FP32 throughout
fp32-ieee-fp16-weights    the same, of weights that hold FP16's values only; also bf16-weights
hf32, tf32                FP32 range, operands of 11 bits (HF32: 11 or 12), FP32 results
fp32-storage-fp16-cube    operands FP16 in bits and range, FP32 results
fp32-storage-bf16-cube    operands BF16, FP32 results
fp16, fp16-saturating     16-bit results that overflow to infinity, or are clamped to ±65504
bf16                      16-bit results
fp16-vector, bf16-vector  exacter than the other operators, which betray the tier
unknown-N-bit             none of these
========================= =====================================================================

An accumulator of fewer than 20 bits is named too, as ``-11-bit-accumulation``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.errors import DeviceLost, PrecisionUnavailable
from serving.numerics.capability import has_fp32_cube
from serving.numerics.conversion import convert
from serving.numerics.devices.device import Device
from serving.numerics.measure import FP32_BITS, Arithmetic, Meter, Overflow, Run
from serving.numerics.precision import PrecisionSpec

__all__ = ["Attestation", "Overflow", "Run", "admit", "attest", "effective_precision", "expected"]

#: FP32 accumulators keep 24 bits; matrix units that align products before they add lose a few.
_ACCUMULATION_BITS = 20
_BITS_OF_FORMATS = {8: "bf16", 11: "fp16"}


@dataclass(frozen=True, slots=True)
class Attestation:
    """What the probe measured, and its name. Bits count the leading one."""

    #: The least precise of all probed operators; names as in the module's table.
    effective: str
    #: The verdicts on matrix products, convolutions and attention alone, without `-emulated`.
    matmul: str
    conv: str
    attention: str
    #: Of what survives as an activation.
    matmul_mantissa_bits: int
    conv_mantissa_bits: int
    #: Of attention's values and scores.
    attention_mantissa_bits: int
    #: Of what survives as a weight; fewer than activations' for `layercast`.
    weight_mantissa_bits: int
    #: Of other operators, found on a sum.
    vector_mantissa_bits: int
    #: Of the accumulator of a long matrix product.
    accumulation_bits: int
    #: What 2 x 65504 and 1e6 become in a matrix product.
    overflow: Overflow
    #: Whether 2^-24, the smallest FP16 subnormal, survives.
    subnormals: bool
    #: For `mixed`: bits of a kept module's weights or results, whichever are fewer.
    kept_mantissa_bits: int | None = None

    @property
    def mantissa_bits(self) -> int:
        """The fewest bits of any probed operator."""
        return min(self.matmul_mantissa_bits, self.conv_mantissa_bits, self.attention_mantissa_bits)


def attest(spec: PrecisionSpec, device: Device) -> Attestation:
    """Probe the arithmetic of a tier: what `convert` makes of a module with `spec` on `device`.

    For `mixed` it is that of the modules outside the kept ones, the least precise, and for
    `autocast` that of the lowered operators.

    Raises:
        PrecisionUnavailable: the device refuses the kind, or fails in an operator that it is not
            known to honour: a card without FP32 products raises when told to keep to them.
    """
    try:
        return _attest(spec, device)
    except (RuntimeError, DeviceLost) as error:
        capability = device.capability(spec.kind)
        if capability.status != "degraded":
            raise
        raise PrecisionUnavailable(
            f"{spec.kind} was asked for on {device.title}, but the probe failed there"
            f"{_own_words(error)}. {capability.reason}"
        ) from error


def _own_words(error: BaseException) -> str:
    """The first line of what the card itself said, which `DeviceLost` has as its cause."""
    said = str(error.__cause__ or error).strip().partition("\n")[0]
    return f" ({said.rstrip('.')})" if said else ""


def _attest(spec: PrecisionSpec, device: Device) -> Attestation:
    bare = replace(spec, keep_fp32=())
    attestation = effective_precision(
        lambda module: convert(module, bare, device),
        device,
        emulated=spec.emulated_on(device.kind, device.card),
    )
    if spec.kind != "mixed":
        return attestation
    kept = Meter(lambda module: convert(module, replace(spec, keep_fp32=("",)), device), device).matmul()
    return replace(attestation, kept_mantissa_bits=min(kept.weight_bits, kept.result_bits))


def effective_precision(run: Run, device: Device, *, emulated: bool = False) -> Attestation:
    """Measure an arithmetic.

    Args:
        run: converts a module as the tier does.
        device: what the result runs on.
        emulated: whether `run` emulates; goes into the name.
    """
    meter = Meter(run, device)
    matmul, conv, attention = meter.matmul(), meter.conv(), meter.attention()
    vector_bits, accumulation_bits = meter.vector_bits(), meter.accumulation_bits()
    weakest = min((matmul, conv, attention), key=lambda a: (a.operand_bits, a.result_bits, a.weight_bits))
    name = _name(weakest, device)
    if vector_bits < weakest.operand_bits:
        name = f"{_format(vector_bits)}-vector"
    if accumulation_bits < _ACCUMULATION_BITS:
        name += f"-{accumulation_bits}-bit-accumulation"
    return Attestation(
        effective=f"{name}-emulated" if emulated else name,
        matmul=_name(matmul, device),
        conv=_name(conv, device),
        attention=_name(attention, device),
        matmul_mantissa_bits=matmul.operand_bits,
        conv_mantissa_bits=conv.operand_bits,
        attention_mantissa_bits=attention.operand_bits,
        weight_mantissa_bits=min(matmul.weight_bits, conv.weight_bits),
        vector_mantissa_bits=vector_bits,
        accumulation_bits=accumulation_bits,
        overflow=matmul.overflow,
        subnormals=meter.subnormals(),
    )


def expected(spec: PrecisionSpec, device: Device) -> frozenset[str]:
    """The effective precisions with which a tier may serve under the name of its kind."""
    match spec.kind:
        # Never emulated under that name: on a card without FP32 products it is something less.
        case "fp32":
            return frozenset({"fp32-ieee"})
        case "layercast":
            return frozenset({f"fp32-ieee-{spec.weights}-weights"})
        case "fp16" | "mixed" | "autocast":
            # Only the probe knows how an NPU is set up: a 910B can be made to saturate.
            either = {"fp16", "fp16-saturating"}
            names = either if device.kind == "npu" else {"fp16-saturating" if device.saturates else "fp16"}
        case _:
            names = {spec.kind}
    suffix = "-emulated" if spec.emulated_on(device.kind, device.card) else ""
    return frozenset(f"{name}{suffix}" for name in names)


def admit(
    spec: PrecisionSpec, device: Device, attestation: Attestation, *, accept_degraded: bool = False
) -> str:
    """The name to serve a tier under.

    Args:
        spec: what was asked for.
        device: where.
        attestation: what `attest` measured.
        accept_degraded: serve a less precise arithmetic under its own name.

    Raises:
        PrecisionUnavailable: the device refuses the kind, or the measured arithmetic is not the
            kind's and was not accepted, or it is none that has a name.
    """
    capability = device.capability(spec.kind)
    if capability.status == "refused":
        raise PrecisionUnavailable(f"{device.title} cannot serve {spec.kind}: {capability.reason}")
    fault = _fault(spec, device, attestation)
    known = not attestation.effective.startswith("unknown")
    if fault is None or (accept_degraded and known):
        return attestation.effective
    because = f" {capability.reason}" if capability.reason else ""
    raise PrecisionUnavailable(f"{spec.kind} was asked for on {device.title}, but {fault}.{because}")


def keeps_name(spec: PrecisionSpec, device: Device, attestation: Attestation) -> bool:
    """Whether the measured arithmetic is the kind's, rather than accepted under a lesser name."""
    return _fault(spec, device, attestation) is None


def _fault(spec: PrecisionSpec, device: Device, attestation: Attestation) -> str | None:
    """In which way the measured arithmetic is not the kind's."""
    names = expected(spec, device)
    if attestation.effective not in names:
        return (
            f"the probe measured {attestation.effective} (matrix products {attestation.matmul}, "
            f"convolutions {attestation.conv}, attention {attestation.attention}) "
            f"and not {' or '.join(sorted(names))}"
        )
    if spec.kind == "autocast" and attestation.vector_mantissa_bits < FP32_BITS:
        return f"its FP32 operators keep {attestation.vector_mantissa_bits} bits of 24"
    kept = attestation.kept_mantissa_bits
    if kept is not None and kept < FP32_BITS and has_fp32_cube(device.family):
        return f"its FP32 modules keep {kept} bits of 24"
    return None


def _format(bits: int) -> str:
    return _BITS_OF_FORMATS.get(bits, f"{bits}-bit")


def _name(arithmetic: Arithmetic, device: Device) -> str:
    operand, result = arithmetic.operand_bits, arithmetic.result_bits
    name = f"unknown-{min(operand, result)}-bit"
    if result == FP32_BITS:
        name = _fp32_name(operand, arithmetic.overflow, device) or name
    elif operand == result and arithmetic.overflow == "none" and operand == 8:  # noqa: PLR2004 - BF16's
        name = "bf16"
    elif operand == result == 11 and arithmetic.overflow != "none":  # noqa: PLR2004 - FP16's
        name = "fp16" if arithmetic.overflow == "inf" else "fp16-saturating"
    if arithmetic.weight_bits < operand:
        name += f"-{_format(arithmetic.weight_bits)}-weights"
    return name


def _fp32_name(operand_bits: int, overflow: Overflow, device: Device) -> str | None:
    """Of an arithmetic with FP32 results."""
    if overflow != "none":
        return "fp32-storage-fp16-cube" if operand_bits == 11 else None  # noqa: PLR2004 - FP16's
    ascend = device.kind == "npu" or device.card.name != "ieee"
    names = {FP32_BITS: "fp32-ieee", 11: "hf32" if ascend else "tf32", 8: "fp32-storage-bf16-cube"}
    if ascend:
        # Documents give HF32 a mantissa of 11 bits without saying whether that counts the leading one.
        names[12] = "hf32"
    return names.get(operand_bits)
