"""The embedded models, built once."""

import pytest
from torch import nn

from serving.models.efficientnet import EfficientNetLite0
from serving.models.minilm import MiniLM
from serving.numerics.devices import Device, open_device


@pytest.fixture(scope="session")
def device() -> Device:
    """The CPU with one thread."""
    return open_device("cpu", threads=1)


@pytest.fixture(scope="session")
def minilm() -> MiniLM:
    """The source; its tokenizer is loaded once."""
    return MiniLM()


@pytest.fixture(scope="session")
def encoder(minilm: MiniLM) -> nn.Module:
    """MiniLM's network."""
    return minilm.build()


@pytest.fixture(scope="session")
def classifier() -> nn.Module:
    """EfficientNet-Lite0's network."""
    return EfficientNetLite0().build()
