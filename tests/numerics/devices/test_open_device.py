"""Which device is opened."""

import pytest
import torch

from serving.errors import ConfigError
from serving.numerics import devices
from serving.numerics.devices import Cpu, open_device


def test_auto_takes_the_best_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU before a GPU before the CPU."""
    made = {"npu": [], "cuda": []}
    monkeypatch.setattr(devices, "Npu", lambda *args, **kwargs: made["npu"].append(kwargs))
    monkeypatch.setattr(devices, "Cuda", lambda *args, **kwargs: made["cuda"].append(kwargs))
    for npu, cuda in ((False, False), (False, True), (True, True)):
        monkeypatch.setattr(devices, "npu_present", lambda npu=npu: npu)
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        opened = open_device("auto", 1, tier="tf32")
        assert isinstance(opened, Cpu) is not (npu or cuda)
    assert made == {"npu": [{"hf32": False, "fp16_cube": True}], "cuda": [{"tf32": True}]}


def test_a_card_is_rehearsed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` with a card is the CPU whatever else there is; a GPU rehearses nothing."""
    monkeypatch.setattr(devices, "npu_present", lambda: True)
    device = open_device("auto", 1, "910a")
    assert (device.kind, device.card.name, device.family, device.saturates) == (
        "cpu", "910a", "cpu-910a", True,
    )  # fmt: skip
    assert device.title == f"{device.name} rehearsing a 910a"
    with pytest.raises(ConfigError, match="rehearsed on a CPU"):
        open_device("cuda", 1, "910a")
    with pytest.raises(ConfigError, match="is no card"):
        open_device("cpu", 1, "911")


def test_unknown_device() -> None:
    """The list is in the message."""
    with pytest.raises(ConfigError, match="'tpu' is no device; the devices are auto, cpu, cuda and npu"):
        open_device("tpu", 1)


def test_cpu_defaults() -> None:
    """A CPU has no stream and cannot be poisoned."""
    device = open_device("cpu", 1)
    with device.running():
        device.synchronize()
    assert device.healthy()
    assert not device.poisoned
    assert not device.saturates
    assert device.title == device.name
