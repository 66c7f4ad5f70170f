"""What a device's failure means for the batch and for the replica."""

from __future__ import annotations

import re

import torch

#: In torch_npu's task-queue mode memory runs out with a plain RuntimeError.
_OUT_OF_MEMORY = re.compile(r"EL0004|Failed to allocate|out of memory", re.IGNORECASE)
#: Names that only a device's own messages hold: runtimes, error codes such as EZ9999 or ERR01100.
_DEVICE_FAULT = re.compile(
    r"CUDA error|CUBLAS_|CUDNN_|NPU function error|Inner error|aclrt|aclnn|\bACL\b|\bERR\d{5}|\bE[A-Z]\d{4}\b"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory for what was asked."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))
    )


def is_device_fault(error: BaseException) -> bool:
    """Whether the error's text is a device's. That it is not proves nothing: codes may be missing."""
    return isinstance(error, RuntimeError) and bool(_DEVICE_FAULT.search(str(error)))
