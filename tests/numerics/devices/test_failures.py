"""Telling a device's failures from a model's."""

import pytest
import torch

from serving.errors import RequestError
from serving.numerics.devices import DeviceLost, DeviceOutOfMemory
from serving.numerics.devices.failures import is_device_fault, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("NPU out of memory. Tried to allocate 66.00 MiB"),
        RuntimeError("EL0004: [PID: 7] Failed to allocate memory."),
        RuntimeError("The Inner error is reported as above. EL0004 ..."),
        RuntimeError("Failed to allocate 4096 bytes"),
    ],
)
def test_out_of_memory(error: Exception) -> None:
    """By its class, or in task-queue mode by its text alone."""
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("The Inner error is reported as above. The process exits for this inner error", True),
        ("NPU function error: call aclnnMatmul failed, error code is 507011", True),
        ("[ERROR] ERR00100 PTA call acl api failed.", True),
        ("EZ9999: Inner Error!", True),
        ("CUDA error: an illegal memory access was encountered", True),
        ("mat1 and mat2 shapes cannot be multiplied (4x4 and 3x3)", False),
        ("ERROR in the model's own words", False),
    ],
)
def test_device_faults(text: str, fault: bool) -> None:
    """By what only a device's messages hold; another kind of exception is never one."""
    assert is_device_fault(RuntimeError(text)) is fault
    assert not is_device_fault(ValueError(text))


def test_errors_have_a_status() -> None:
    """Both are answered with 503, and a client may come back."""
    assert (DeviceOutOfMemory.status, DeviceOutOfMemory.code) == (503, "device_oom")
    assert issubclass(DeviceOutOfMemory, RequestError)
    assert (DeviceLost.status, DeviceLost.code) == (503, "device_lost")
    assert issubclass(DeviceLost, RequestError)
