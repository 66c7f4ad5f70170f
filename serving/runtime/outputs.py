"""What a module returned, as the outputs of its signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from serving.errors import ModelError
from serving.tensors import Array, TensorSpec


def by_order(returned: Any, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """What a module returned, as tensors in the order of the signature's outputs.

    Raises:
        ModelError: something is missing, or is no tensor.
    """
    if isinstance(returned, torch.Tensor):
        tensors: list[Any] = [returned]
    elif isinstance(returned, Mapping):
        tensors = [returned.get(spec.name) for spec in specs]
    elif isinstance(returned, tuple | list):
        tensors = list(returned)
    else:
        raise ModelError(f"the model returned {type(returned).__name__}, not tensors")
    if len(tensors) != len(specs):
        raise ModelError(f"the model returned {len(tensors)} outputs; its signature has {len(specs)}")
    for spec, tensor in zip(specs, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"the model returned no tensor for output {spec.name}")
    return tensors


def checked_output(spec: TensorSpec, array: Array, rows: int) -> Array:
    """An output in the signature's dtype, its shape checked.

    Raises:
        ModelError: the shape is not the signature's, or the dtype is of another kind.
    """
    if not spec.accepts(array.shape) or array.shape[0] != rows:
        raise ModelError(
            f"output {spec.name} has shape {list(array.shape)} for {rows} rows; "
            f"its signature says {list(spec.shape)}"
        )
    if array.dtype != spec.numpy_dtype:
        # Floats come back as FP32 from every tier and may be stored wider; nothing is narrowed.
        if not (
            array.dtype.kind == spec.numpy_dtype.kind and spec.numpy_dtype.itemsize > array.dtype.itemsize
        ):
            raise ModelError(f"output {spec.name} is {array.dtype}; its signature says {spec.dtype}")
        array = array.astype(spec.numpy_dtype)
    return array
