"""A classifier that FP16 ruins with every output finite: no weight tells, only its answers do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from tumour_classifier import Tumours, build, train, tumours

from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.operator_audit import departures
from serving.numerics.precision import PrecisionSpec


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """Trained."""
    weights = tmp_path_factory.mktemp("tumours") / "weights.safetensors"
    train(weights)
    network = build()
    network.load_state_dict(load_file(weights))
    return network.requires_grad_(False)


@pytest.fixture(scope="module")
def held_out() -> Tumours:
    """The test rows."""
    return tumours()[1]


def test_nearly_every_row_s_squares_overflow() -> None:
    """568 of 569 rows have a squared length beyond FP16's range."""
    rows = np.concatenate([part.measures for part in tumours()])
    assert rows.shape == (569, 30)
    assert int((np.square(rows).sum(axis=1) > 65504).sum()) == 568


@pytest.mark.parametrize(
    ("spec", "is_right"),
    [
        (PrecisionSpec("fp32"), True),
        (PrecisionSpec("bf16"), True),
        (PrecisionSpec("fp16"), False),
        (PrecisionSpec("fp16", native=True), False),
        (PrecisionSpec("mixed"), False),
        (PrecisionSpec("mixed", keep_fp32=("front",)), True),
        (PrecisionSpec("mixed", keep_fp32=("front",), native=True), True),
    ],
)
def test_what_each_tier_makes_of_it(
    *, classifier: nn.Module, held_out: Tumours, device: Device, spec: PrecisionSpec, is_right: bool
) -> None:
    """Right in 0.94 of the rows, or one answer to all of them: as good as a guess, and finite."""
    x = [torch.from_numpy(held_out.measures)]
    tier = convert(classifier, spec, device, x)
    logits = tier(*x).numpy()
    assert np.isfinite(logits).all()
    accuracy = held_out.accuracy(logits)
    assert accuracy > 0.92 if is_right else accuracy < 0.45
    # Neither the weights nor the operators' formats tell the one from the other.
    assert tier.weight_losses == ()
    assert departures(tier, x) == ()


def test_a_saturating_card_is_wrong_otherwise(classifier: nn.Module, held_out: Tumours) -> None:
    """On a 910A the length is clamped instead of infinite: other wrong values, still finite."""
    x = torch.from_numpy(held_out.measures)
    ieee, clamped = (
        convert(classifier, PrecisionSpec("fp16"), open_device("cpu", 1, card))(x)
        for card in ("ieee", "910a")
    )
    assert torch.isfinite(clamped).all()
    assert not torch.equal(ieee, clamped)


def test_training_repeats(tmp_path: Path) -> None:
    """The same weights each time, whatever random numbers were drawn before."""
    torch.manual_seed(1)
    train(tmp_path / "a")
    torch.manual_seed(2)
    train(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
