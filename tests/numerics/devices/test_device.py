"""Arrays in and out."""

import numpy as np
import pytest
import torch

from serving.errors import ModelError
from serving.numerics.devices import Device


@pytest.mark.parametrize("dtype", ["?", "u1", "<i8", "<f2", "<f4", "<f8", ">f4"])
def test_round_trip(device: Device, dtype: str) -> None:
    """Values, shape and dtype survive, also from memory that cannot be written to."""
    array = np.arange(6).reshape(2, 3).astype(dtype)
    array.flags.writeable = False
    (tensor,) = device.to_device([array])
    back = device.to_host(tensor)
    assert back.tolist() == array.tolist()
    assert back.dtype == array.dtype.newbyteorder("=")


def test_reversed_and_empty_arrays(device: Device) -> None:
    """Negative strides and no rows are arrays like others."""
    reversed_rows, empty = device.to_device([np.arange(4)[::-1], np.empty((0, 3), np.float32)])
    assert reversed_rows.tolist() == [3, 2, 1, 0]
    assert empty.shape == (0, 3)


def test_from_buffer_without_a_warning(device: Device) -> None:
    """A request's bytes are read-only; torch would warn, and warnings are errors here."""
    (tensor,) = device.to_device([np.frombuffer(b"\x00\x00\x80\x3f", dtype="<f4")])
    assert tensor.item() == 1


def test_objects_are_refused(device: Device) -> None:
    """BYTES that no preprocessing turned into numbers are the model's error."""
    with pytest.raises(ModelError, match="BYTES"):
        device.to_device([np.array([b"text"], dtype=object)])


def test_to_host_of_bf16_and_inference_tensors(device: Device) -> None:
    """BF16 becomes FP32; a transposed inference tensor becomes a contiguous array."""
    assert device.to_host(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
    with torch.inference_mode():
        tensor = torch.arange(6.0).view(2, 3).t()
    assert device.to_host(tensor).flags.c_contiguous
