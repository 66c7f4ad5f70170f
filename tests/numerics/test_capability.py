"""The whole table, written a second time."""

import pytest
import torch

from serving.errors import ConfigError, PrecisionUnavailable
from serving.numerics.capability import (
    FAMILIES,
    KINDS,
    TABLE,
    Family,
    capability,
    cuda_family,
    has_fp32_cube,
    npu_family,
)
from serving.numerics.conversion import convert
from serving.numerics.devices import open_device
from serving.numerics.precision import PrecisionSpec

#: h: honoured, e: emulated, d: degraded, r: refused.
EXPECTED = """
            fp32  fp16  mixed bf16  autocast layercast hf32  tf32
cpu-ieee    h     e     e     e     e        h         r     r
cpu-910a    d     e     e     r     e        d         r     r
cpu-910b    h     e     e     e     e        h         e     r
cpu-310p    d     e     e     r     e        d         r     r
cuda-80     h     h     h     h     h        h         r     h
cuda-older  h     h     h     r     h        h         r     r
npu-910a    d     h     h     r     h        d         r     r
npu-310p    d     h     h     r     h        d         r     r
npu-910b    h     h     h     h     h        h         h     r
npu-310b    h     h     h     r     h        h         r     r
npu-a3      h     h     h     h     h        h         h     r
npu-950     h     h     h     h     h        h         h     r
"""


def test_table() -> None:
    """Every kind on every family, no more and no fewer."""
    heading, *lines = EXPECTED.strip().splitlines()
    assert heading.split() == list(KINDS)
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert set(rows) == set(FAMILIES) == set(TABLE)
    for family in FAMILIES:
        assert [capability(kind, family).status[0] for kind in KINDS] == rows[family], family


@pytest.mark.parametrize("family", FAMILIES)
def test_refusals_are_explained_in_one_sentence(family: Family) -> None:
    """Whatever is not had as named says why, and nothing else does."""
    for kind in KINDS:
        found = capability(kind, family)
        assert bool(found.reason) == (found.status in ("degraded", "refused"))
        assert not found.reason or found.reason.endswith(".")


@pytest.mark.parametrize("card", ["ieee", "910a", "910b", "310p"])
def test_conversion_keeps_to_the_table(card: str) -> None:
    """What is refused raises with the reason; what is emulated or not says so."""
    device = open_device("cpu", 1, card)
    for kind in KINDS:
        found = device.capability(kind)
        if found.status == "refused":
            with pytest.raises(PrecisionUnavailable) as raised:
                convert(torch.nn.Linear(2, 2), PrecisionSpec(kind), device)
            assert found.reason in str(raised.value)
        else:
            tier = convert(torch.nn.Linear(2, 2), PrecisionSpec(kind), device)
            assert tier.emulated == (found.status != "honoured")


def test_native_kernels_rehearse_no_card() -> None:
    """Half kernels of torch's own do not saturate, so they are refused for a card."""
    with pytest.raises(PrecisionUnavailable, match="not as a 910a"):
        convert(torch.nn.Linear(2, 2), PrecisionSpec("fp16", native=True), open_device("cpu", 1, "910a"))


@pytest.mark.parametrize(
    ("soc", "family"),
    [
        (100, "npu-910a"), (102, "npu-910a"), (104, "npu-910a"),
        (200, "npu-310p"), (205, "npu-310p"),
        (220, "npu-910b"), (225, "npu-910b"),
        (240, "npu-310b"), (243, "npu-310b"),
        (250, "npu-a3"), (256, "npu-a3"),
        (260, "npu-950"),
    ],
)  # fmt: skip
def test_socs(soc: int, family: Family) -> None:
    """Ranges, not names: "Ascend910B" is 104, an old 910."""
    assert npu_family(soc) == family


@pytest.mark.parametrize("soc", [-1, 0, 99, 105, 206, 219, 226, 244, 257, 261])
def test_unknown_socs(soc: int) -> None:
    """Of a card that nobody knows nothing is promised."""
    with pytest.raises(ConfigError, match=f"SoC version {soc}"):
        npu_family(soc)


def test_gpus_and_cubes() -> None:
    """Ampere is 8.0; FP32 products are missing on the old Ascend cards alone."""
    assert cuda_family((7, 5)) == "cuda-older"
    assert cuda_family((8, 0)) == cuda_family((9, 0)) == "cuda-80"
    without = {family for family in FAMILIES if not has_fp32_cube(family)}
    assert without == {"cpu-910a", "cpu-310p", "npu-910a", "npu-310p"}
