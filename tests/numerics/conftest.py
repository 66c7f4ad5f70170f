"""What the tests of numerics share."""

import pytest
import torch

from serving.numerics.devices import Device, open_device


@pytest.fixture(scope="session")
def device() -> Device:
    """The CPU with one thread, its switches set strictly."""
    return open_device("cpu", threads=1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
