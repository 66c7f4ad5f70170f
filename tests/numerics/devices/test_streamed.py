"""A device with a stream, rehearsed on the CPU: copies, failures, and what follows them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from streamed_device import FakeDevice

from serving.numerics.devices import DeviceLost, DeviceOutOfMemory


@pytest.fixture
def device() -> FakeDevice:
    """A healthy one."""
    return FakeDevice()


def test_round_trip(device: FakeDevice) -> None:
    """Arrays arrive, results leave after a wait, as memory of the caller's own."""
    (tensor,) = device.to_device([np.arange(6.0).reshape(2, 3)])
    array = device.to_host(tensor)
    tensor.zero_()
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert device.stream.waits == 1
    assert device.to_host(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32
    device.synchronize()
    assert device.stream.waits == 3
    assert device.entries == 4


def test_models_own_errors_pass(device: FakeDevice) -> None:
    """A device that still computes is not blamed for the model's mistake."""
    for error in (ValueError("bug"), RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
        with pytest.raises(type(error), match=str(error)), device.running():
            raise error
    assert not device.poisoned
    assert device.healthy()


def refuses_all_work(device: FakeDevice) -> bool:
    """Whether every entry is closed."""
    entries: list[Callable[[], object]] = [
        lambda: device.to_device([np.ones(1)]),
        lambda: device.to_host(torch.ones(1)),
        device.synchronize,
        lambda: device.running().__enter__(),
    ]
    for entry in entries:
        with pytest.raises(DeviceLost, match="takes no more work"):
            entry()
    return not device.healthy()


def test_a_fault_ends_the_device(device: FakeDevice) -> None:
    """After the device's own error nothing is served, though it might still compute."""
    with pytest.raises(DeviceLost), device.running():
        raise RuntimeError("NPU function error: call aclnnMatmul failed, error code is 507011")
    assert device.poisoned
    assert refuses_all_work(device)


def test_a_fault_that_comes_out_with_the_copy(device: FakeDevice) -> None:
    """Errors of queued operators are raised by whoever waits first."""
    device.stream.error = RuntimeError("The Inner error is reported as above.")
    with pytest.raises(DeviceLost):
        device.to_host(torch.ones(1))
    assert refuses_all_work(device)


def test_a_fault_without_a_code(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says nothing is the device's if the known answer is wrong afterwards."""
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: torch.zeros(args[0]))
    with pytest.raises(DeviceLost), device.running():
        raise RuntimeError("something failed")
    assert refuses_all_work(device)


def test_work_dropped_in_silence(device: FakeDevice) -> None:
    """No answer leaves if the counter on the device was not counted on."""
    device.to_host(torch.ones(1))
    assert device._counter is not None
    device._counter.zero_()
    with pytest.raises(DeviceLost, match="in silence"):
        device.to_host(torch.ones(1))
    assert refuses_all_work(device)


def test_counter_starts_again(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never overflows."""
    monkeypatch.setattr("serving.numerics.devices.streamed._LAST_COUNT", 2)
    for _ in range(5):
        device.to_host(torch.ones(1))
    assert device._count == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("EL0004")])
def test_out_of_memory_is_survived(device: FakeDevice, error: Exception) -> None:
    """The batch is refused, memory is given back, and the next batch runs."""
    with pytest.raises(DeviceOutOfMemory), device.running():
        raise error
    assert device.released == 1
    assert device.to_host(torch.ones(1)).tolist() == [1]


def test_out_of_memory_that_broke_the_device(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """In task-queue mode it may take the queue with it; then the device is lost."""
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: torch.zeros(args[0]))
    with pytest.raises(DeviceLost), device.running():
        raise RuntimeError("EL0004: Failed to allocate memory")
    assert device.poisoned


def test_unhealthy_when_even_the_question_raises(device: FakeDevice) -> None:
    """A check that fails is an answer too."""
    device.stream.error = RuntimeError("stream is dead")
    assert not device.healthy()
    assert device.poisoned
