"""Tensors as the wire knows them: Open Inference Protocol dtypes, shapes and signatures.

A tensor's carrier is a numpy array whose first dimension counts rows. `BYTES` is an
object array of `bytes`. This module knows neither torch nor a protocol.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
#: Named tensors in the signature's order. All have the same number of rows.
Tensors = dict[str, Array]

OutputKind = Literal["logits", "probabilities", "embedding", "regression"]
OUTPUT_KINDS: tuple[OutputKind, ...] = get_args(OutputKind)

#: OIP dtype name -> numpy dtype, little-endian as the binary extension sends it.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype("?"),
        "UINT8": np.dtype("u1"),
        "UINT16": np.dtype("<u2"),
        "UINT32": np.dtype("<u4"),
        "UINT64": np.dtype("<u8"),
        "INT8": np.dtype("i1"),
        "INT16": np.dtype("<i2"),
        "INT32": np.dtype("<i4"),
        "INT64": np.dtype("<i8"),
        "FP16": np.dtype("<f2"),
        "FP32": np.dtype("<f4"),
        "FP64": np.dtype("<f8"),
        "BYTES": np.dtype("O"),
    }
)

#: A dimension that the request is free to choose.
FREE = -1
MAX_RANK = 16
MAX_ELEMENTS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a signature. `shape[0]` is the rows, always `FREE`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    #: What an output means; comparisons that need it (top-1) ask for it.
    kind: OutputKind | None = None
    #: Whether NaN and infinity are legitimate in it: a mask's, say.
    allow_nonfinite: bool = False

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The carrier's dtype."""
        return DTYPES[self.dtype]

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether `shape` fits: the same rank, and equal wherever the signature is fixed."""
        return len(shape) == len(self.shape) and all(
            want in (FREE, got) for want, got in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Signature:
    """What a model takes and gives, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def input(self, name: str) -> TensorSpec | None:
        """The input of that name, if there is one."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        """The output of that name, if there is one."""
        return next((spec for spec in self.outputs if spec.name == name), None)


def element_count(shape: Sequence[int]) -> int:
    """The product of a shape's dimensions, in Python's unbounded integers."""
    return math.prod(shape)


def row_count(tensors: Mapping[str, Array]) -> int:
    """Rows of a set of tensors: the first dimension, which all of them share."""
    return int(next(iter(tensors.values())).shape[0])


def size_bytes(tensors: Mapping[str, Array]) -> int:
    """What the elements of some tensors take; of `BYTES`, their content."""
    total_bytes = 0
    for array in tensors.values():
        total_bytes += sum(map(len, array.flat)) if array.dtype.hasobject else array.nbytes
    return total_bytes


def slice_rows(tensors: Mapping[str, Array], start: int, stop: int) -> Tensors:
    """Rows `start:stop` of every tensor, as views."""
    return {name: array[start:stop] for name, array in tensors.items()}


def all_finite(array: Array) -> bool:
    """Whether no element of a floating point array is NaN or infinite."""
    return bool(np.logical_and.reduce(np.isfinite(array), axis=None))  # `.all()` takes half as long again.
