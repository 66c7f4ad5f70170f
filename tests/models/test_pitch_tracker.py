"""A published model that FP16 ruins in silence: what plain `.half()` does to it, and what Halftone does."""

import numpy as np
import pytest
import torch
from pitch_tracker import PitchTracker, breathy_voice, cents_off
from torch import nn

from serving.errors import PrecisionUnavailable
from serving.numerics.conversion import convert
from serving.numerics.devices import Device
from serving.numerics.precision import PrecisionSpec

FRAMES = 15


@pytest.fixture(scope="module")
def tracker() -> nn.Module:
    """The network with its weights."""
    return PitchTracker().build()


@pytest.fixture(scope="module")
def voice() -> tuple[torch.Tensor, np.ndarray]:
    """Preprocessed frames [15, 1024], and the true pitch of each in Hz."""
    frames, pitch_hz = breathy_voice(FRAMES)
    return torch.from_numpy(PitchTracker().preprocess({"frame": frames})["frame"]), pitch_hz


@pytest.fixture(scope="module")
def reference(device: Device, tracker: nn.Module, voice: tuple[torch.Tensor, np.ndarray]) -> torch.Tensor:
    """The FP32 tier's answers: [15, 360]."""
    answers: torch.Tensor = convert(tracker, PrecisionSpec("fp32"), device)(voice[0])
    return answers


def test_the_reference_hears_the_pitch(
    voice: tuple[torch.Tensor, np.ndarray], reference: torch.Tensor
) -> None:
    """Within a quarter tone of the truth and sure of it, on nearly every frame: the weights are right."""
    assert (cents_off(reference.numpy(), voice[1]) < 50).sum() >= 14
    assert reference.max(dim=1).values.median() > 0.7


def test_plain_half_weights_mishear_in_silence(
    device: Device, tracker: nn.Module, voice: tuple[torch.Tensor, np.ndarray], reference: torch.Tensor
) -> None:
    """What `.half()` stores, computed as FP16: most answers change, and every one is finite.

    Emulated, since torch's own half kernels take minutes for this.
    """
    halved = PitchTracker().build()
    with torch.no_grad():
        for tensor in (*halved.parameters(), *halved.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.half())
    assert int(torch.isinf(halved.conv2_BN.running_var).sum()) == 64
    tier = convert(halved, PrecisionSpec("fp16"), device)
    # The variances are infinite already, so the conversion has nothing left to lose.
    assert tier.kept_fp32 == ()
    answers = tier(voice[0])
    assert torch.isfinite(answers).all()
    assert int((answers.argmax(1) != reference.argmax(1)).sum()) > FRAMES / 2
    assert ((answers - reference).norm(dim=1) / reference.norm(dim=1)).max() > 0.9


@pytest.mark.parametrize("kind", ["fp16", "mixed"])
def test_sixteen_bit_tiers_keep_the_answers(
    device: Device,
    tracker: nn.Module,
    voice: tuple[torch.Tensor, np.ndarray],
    reference: torch.Tensor,
    kind: str,
) -> None:
    """The module that FP16 cannot hold stays FP32, by name and with the reason; top-1 is FP32's."""
    tier = convert(tracker, PrecisionSpec(kind), device, [voice[0][:2]])
    assert "conv2_BN" in tier.kept_fp32
    answers = tier(voice[0])
    assert torch.equal(answers.argmax(1), reference.argmax(1))
    assert ((answers - reference).norm(dim=1) / reference.norm(dim=1)).max() < 5e-3
    if kind == "fp16":
        assert tier.kept_fp32 == ("conv2_BN",)
        material = [str(loss) for loss in tier.weight_losses if loss.material]
        assert len(material) == 1
        assert material[0].startswith("conv2_BN.running_var: of 128 values 64 become infinite")
        assert material[0].endswith("the largest is 497160")


def test_the_refusing_setting_refuses(device: Device, tracker: nn.Module) -> None:
    """With the 64 variances and the largest of them."""
    spec = PrecisionSpec("fp16", on_weight_loss="refuse")
    with pytest.raises(
        PrecisionUnavailable,
        match=r"fp16 loses weights: conv2_BN\.running_var: of 128 values 64 become infinite .* 497160",
    ):
        convert(tracker, spec, device)
    assert convert(tracker, PrecisionSpec("bf16", on_weight_loss="refuse"), device).kept_fp32 == ()
