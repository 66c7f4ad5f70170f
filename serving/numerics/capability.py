"""Which device honours which kind of tier: one table, with the reason of every refusal.

The table says what is to be expected; what a tier is served under is decided by the probe.
Families of NPUs are ranges of SoC versions, those of GPUs compute capabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from serving.errors import ConfigError
from serving.numerics.precision import Kind

Status = Literal["honoured", "emulated", "degraded", "refused"]
Family = Literal[
    "cpu-ieee", "cpu-910a", "cpu-910b", "cpu-310p",
    "cuda-80", "cuda-older",
    "npu-910a", "npu-310p", "npu-910b", "npu-310b", "npu-a3", "npu-950",
]  # fmt: skip

KINDS: tuple[Kind, ...] = get_args(Kind)
FAMILIES: tuple[Family, ...] = get_args(Family)


@dataclass(frozen=True, slots=True)
class Capability:
    """What becomes of one kind on one family of devices.

    `honoured`: the device computes so. `emulated`: the CPU computes FP32 and rounds.
    `degraded`: runs, but less precisely than the name says, so the caller must accept the
    measured name. `refused`: does not run.
    """

    status: Status
    #: One sentence, for `degraded` and `refused`.
    reason: str = ""


_HONOURED = Capability("honoured")
_EMULATED = Capability("emulated")

_NO_TF32 = Capability("refused", "TF32 is an arithmetic of NVIDIA GPUs; this device has none.")
_NO_HF32_CPU = Capability(
    "refused", "HF32 is an arithmetic of Ascend cards; on a CPU it needs a rehearsed one: card: 910b."
)
_NO_HF32_CUDA = Capability("refused", "HF32 is an arithmetic of Ascend cards; a GPU has tf32 instead.")
_NO_HF32_OLD = Capability("refused", "The matrix unit of a 910A or 310P has FP16 only, no HF32.")
_NO_HF32_310B = Capability("refused", "No source says that the 310B computes in HF32.")
_NO_BF16_OLD = Capability("refused", "A 910A or 310P has no BF16.")
_NO_BF16_310B = Capability(
    "refused", "torch_npu reports BF16 on the 310B by its SoC number only; it is not honoured there."
)
_NO_16_BIT_OLD_GPU = Capability("refused", "BF16 and TF32 need compute capability 8.0 (Ampere) or later.")
_FP16_CUBE = Capability(
    "degraded", "The matrix unit of a 910A or 310P has FP16 only: FP32 products take FP16 operands."
)

_ASCEND: Mapping[Kind, Capability] = dict.fromkeys(KINDS, _HONOURED) | {"tf32": _NO_TF32}
_ASCEND_FP16_ONLY: Mapping[Kind, Capability] = {
    **_ASCEND, "fp32": _FP16_CUBE, "layercast": _FP16_CUBE, "bf16": _NO_BF16_OLD, "hf32": _NO_HF32_OLD,
}  # fmt: skip
_CUDA: Mapping[Kind, Capability] = dict.fromkeys(KINDS, _HONOURED) | {"hf32": _NO_HF32_CUDA}
_EMULATED_16_BITS: Mapping[Kind, Capability] = {
    "fp16": _EMULATED, "mixed": _EMULATED, "autocast": _EMULATED, "bf16": _EMULATED,
}  # fmt: skip
_CPU: Mapping[Kind, Capability] = {
    **_EMULATED_16_BITS, "fp32": _HONOURED, "layercast": _HONOURED, "hf32": _NO_HF32_CPU, "tf32": _NO_TF32,
}  # fmt: skip
_CPU_FP16_ONLY: Mapping[Kind, Capability] = {
    **_ASCEND_FP16_ONLY, **_EMULATED_16_BITS, "bf16": _NO_BF16_OLD,
}  # fmt: skip

TABLE: Mapping[Family, Mapping[Kind, Capability]] = MappingProxyType(
    {
        "cpu-ieee": _CPU,
        "cpu-910a": _CPU_FP16_ONLY,
        "cpu-310p": _CPU_FP16_ONLY,
        "cpu-910b": {**_CPU, "hf32": _EMULATED},
        "cuda-80": _CUDA,
        "cuda-older": {**_CUDA, "bf16": _NO_16_BIT_OLD_GPU, "tf32": _NO_16_BIT_OLD_GPU},
        "npu-910a": _ASCEND_FP16_ONLY,
        "npu-310p": _ASCEND_FP16_ONLY,
        "npu-910b": _ASCEND,
        "npu-310b": {**_ASCEND, "bf16": _NO_BF16_310B, "hf32": _NO_HF32_310B},
        "npu-a3": _ASCEND,
        "npu-950": _ASCEND,
    }
)

#: `torch.npu.get_soc_version()`, first and last. "Ascend910B" without a digit is 104, an old 910.
_SOCS: tuple[tuple[int, int, Family], ...] = (
    (100, 104, "npu-910a"),
    (200, 205, "npu-310p"),
    (220, 225, "npu-910b"),
    (240, 243, "npu-310b"),
    (250, 256, "npu-a3"),
    (260, 260, "npu-950"),
)
_AMPERE = (8, 0)


def capability(kind: Kind, family: Family) -> Capability:
    """What becomes of `kind` on `family`."""
    return TABLE[family][kind]


def npu_family(soc_version: int) -> Family:
    """The family of an NPU by its SoC version.

    Raises:
        ConfigError: the number is in no known range, so nothing is known of its arithmetic.
    """
    for first, last, family in _SOCS:
        if first <= soc_version <= last:
            return family
    raise ConfigError(f"SoC version {soc_version} is none that this version knows", "device")


def cuda_family(capability: tuple[int, int]) -> Family:
    """The family of a GPU by its compute capability."""
    return "cuda-80" if capability >= _AMPERE else "cuda-older"


def has_fp32_cube(family: Family) -> bool:
    """Whether the matrix unit multiplies FP32 operands without shortening them."""
    return TABLE[family]["fp32"].status == "honoured"
