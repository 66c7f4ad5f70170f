"""EfficientNet-Lite0: pixels, classes, and what its weights lose."""

import numpy as np
import pytest
import torch
from torch import nn

from serving.models.efficientnet import EfficientNetLite0
from serving.numerics.conversion import convert
from serving.numerics.devices import Device
from serving.numerics.precision import PrecisionSpec

#: ImageNet's "ping-pong ball".
BALL = 722


@pytest.fixture(scope="module")
def image() -> list[torch.Tensor]:
    """The drawn ball, preprocessed: [1, 3, 224, 224]."""
    source = EfficientNetLite0()
    return [torch.from_numpy(source.preprocess(source.examples())["image"][:1])]


def test_preprocess_scales_and_transposes() -> None:
    """Pixels become (p - 127) / 128, channels first, and FP16 holds them exactly."""
    pixels = np.zeros((2, 224, 224, 3), dtype=np.uint8)
    pixels[1, 5, 7] = (255, 127, 0)
    scaled = EfficientNetLite0().preprocess({"image": pixels})["image"]
    assert scaled.shape == (2, 3, 224, 224)
    assert scaled.dtype == np.float32
    assert scaled[1, :, 5, 7].tolist() == [1.0, 0.0, -127 / 128]
    assert np.array_equal(scaled, scaled.astype(np.float16))


def test_no_rows() -> None:
    """No images, no error."""
    empty = {"image": np.zeros((0, 224, 224, 3), dtype=np.uint8)}
    assert EfficientNetLite0().preprocess(empty)["image"].shape == (0, 3, 224, 224)


def test_examples_fit_the_signature() -> None:
    """Examples are valid requests, the same every time."""
    source = EfficientNetLite0()
    (spec,) = source.signature.inputs
    first, second = (source.examples()[spec.name] for _ in range(2))
    assert spec.accepts(first.shape)
    assert first.dtype == spec.numpy_dtype
    assert np.array_equal(first, second)


def test_recognises_a_ball(classifier: nn.Module, device: Device, image: list[torch.Tensor]) -> None:
    """The published weights are in the right places: the drawn ball is a ball with 90 % confidence."""
    probabilities = convert(classifier, PrecisionSpec("fp32"), device)(*image).softmax(-1)
    assert probabilities[0].argmax() == BALL
    assert probabilities[0, BALL] > 0.9


def test_fp16_keeps_modules_with_dead_weights(
    classifier: nn.Module, device: Device, image: list[torch.Tensor]
) -> None:
    """Some layers have more than 1 % of weights below FP16's range: they stay FP32, by name."""
    tier = convert(classifier, PrecisionSpec("fp16"), device, image)
    assert "_conv_stem" in tier.kept_fp32
    assert {loss.name.rpartition(".")[0] for loss in tier.weight_losses if loss.material} == set(
        tier.kept_fp32
    )
    reference = convert(classifier, PrecisionSpec("fp32"), device)(*image)
    y = tier(*image)
    assert y.argmax() == BALL
    assert 1e-4 < (y - reference).norm() / reference.norm() < 2e-2
