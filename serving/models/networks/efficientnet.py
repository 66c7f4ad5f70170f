"""EfficientNet-Lite0: the network of Tan and Le (2019) without squeeze-and-excitation, with ReLU6.

Attribute names are those of the published checkpoint's state dict.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

STEM_CHANNELS = 32
HEAD_CHANNELS = 1280
CLASSES = 1000
#: The TensorFlow original's batch normalisation.
EPSILON = 1e-3
#: (blocks, kernel, stride of the first, expansion, output channels) of each stage.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class SameConv2d(nn.Conv2d):
    """Convolution without bias, padded as TensorFlow's SAME: an odd pixel goes below and right.

    Sides must be divisible by the stride, as those of the stages are: 224, 112, ... 7.
    """

    def __init__(self, inward: int, outward: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        total = kernel - stride
        even = total // 2 if total % 2 == 0 else 0
        super().__init__(inward, outward, kernel, stride, even, groups=groups, bias=False)
        #: Left, right, top, bottom, where both sides differ.
        self.uneven = (total // 2, total - total // 2) * 2 if total % 2 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, inward, height, width] -> [rows, outward, height / stride, width / stride]."""
        return super().forward(x if self.uneven is None else functional.pad(x, self.uneven))


class Block(nn.Module):
    """Inverted bottleneck: expand, convolve each channel, project; add the input where shapes agree."""

    def __init__(self, inward: int, outward: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inward * expansion
        self.expands = expansion != 1
        if self.expands:
            self._expand_conv = SameConv2d(inward, inner, 1)
            self._bn0 = nn.BatchNorm2d(inner, eps=EPSILON)
        self._depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner)
        self._bn1 = nn.BatchNorm2d(inner, eps=EPSILON)
        self._project_conv = SameConv2d(inner, outward, 1)
        self._bn2 = nn.BatchNorm2d(outward, eps=EPSILON)
        self._activation = nn.ReLU6()
        self.adds = stride == 1 and inward == outward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, inward, height, width] -> [rows, outward, height / stride, width / stride]."""
        inner = self._activation(self._bn0(self._expand_conv(x))) if self.expands else x
        inner = self._activation(self._bn1(self._depthwise_conv(inner)))
        out: torch.Tensor = self._bn2(self._project_conv(inner))
        return out + x if self.adds else out


class EfficientNet(nn.Module):
    """Images -> logits over the 1000 ImageNet classes."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, STEM_CHANNELS, 3, stride=2)
        self._bn0 = nn.BatchNorm2d(STEM_CHANNELS, eps=EPSILON)
        self._blocks = nn.ModuleList(_blocks())
        self._conv_head = SameConv2d(STAGES[-1][-1], HEAD_CHANNELS, 1)
        self._bn1 = nn.BatchNorm2d(HEAD_CHANNELS, eps=EPSILON)
        self._pooling = nn.AdaptiveAvgPool2d(1)
        self._fc = nn.Linear(HEAD_CHANNELS, CLASSES)
        self._activation = nn.ReLU6()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [rows, 3, 224, 224], scaled -> logits [rows, 1000]."""
        x = self._activation(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = self._activation(self._bn1(self._conv_head(x)))
        return self._fc(self._pooling(x).flatten(1))  # type: ignore[no-any-return]


def _blocks() -> list[Block]:
    blocks = []
    inward = STEM_CHANNELS
    for repeats, kernel, stride, expansion, outward in STAGES:
        for index in range(repeats):
            blocks.append(Block(inward, outward, kernel, stride if index == 0 else 1, expansion))
            inward = outward
    return blocks
