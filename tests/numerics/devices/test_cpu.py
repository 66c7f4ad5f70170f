"""The CPU: strict switches, memory, what cannot be opened."""

import pytest
import torch

from serving.errors import ConfigError
from serving.numerics.devices import open_device


def test_switches_are_read_back() -> None:
    """Whatever was set before, FP32 means FP32 after opening."""
    torch.set_float32_matmul_precision("medium")
    device = open_device("cpu", threads=1)
    assert device.switches["float32_matmul_precision"] == "highest"
    assert device.switches["mkldnn.matmul.fp32_precision"] == "ieee"
    assert device.switches["mkldnn.conv.fp32_precision"] == "ieee"
    assert device.switches["num_threads"] == "1" == str(torch.get_num_threads())
    assert torch.get_float32_matmul_precision() == "highest"


def test_name_and_memory() -> None:
    """The processor has a name and the process some resident memory."""
    device = open_device("cpu", threads=1)
    assert device.name
    assert device.kind == device.torch_device.type == "cpu"
    assert device.memory_bytes()["rss"] > 10 << 20


def test_no_threads() -> None:
    """Zero threads is a mistake, not a default."""
    with pytest.raises(ConfigError, match="at least 1 thread"):
        open_device("cpu", threads=0)
