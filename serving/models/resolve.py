"""`source: package.module:name` in the configuration -> a `ModelSource`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.errors import ConfigError, HalftoneError
from serving.models.source import ModelSource
from serving.tensors import FREE, Signature, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch

#: Rows of the examples made for a callable that brings none, and the size of free dimensions.
EXAMPLE_ROWS = 2
EXAMPLE_FREE_SIZE = 8


class CallableSource(ModelSource):
    """A plain callable as a `ModelSource`: the configuration declares what it takes and gives."""

    def __init__(self, build: Callable[[], Any], signature: Signature, reference: str) -> None:
        self._build = build
        self._reference = reference
        self.signature = signature

    def build(self) -> torch.nn.Module:
        """The callable's module.

        Raises:
            ConfigError: it returned something else.
        """
        import torch  # noqa: PLC0415  Gateways import this module and stay without torch.

        module = self._build()
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"{self._reference} returned {type(module).__name__}, not a torch.nn.Module")
        return module

    def examples(self) -> Tensors:
        """Inputs made from the signature."""
        return examples_of(self.signature)


def examples_of(signature: Signature) -> Tensors:
    """Two rows of each input: a fixed seed, small values."""
    generator = np.random.default_rng(0)
    return {spec.name: _example(spec, generator) for spec in signature.inputs}


def _example(spec: TensorSpec, generator: np.random.Generator) -> Any:
    shape = (EXAMPLE_ROWS, *(EXAMPLE_FREE_SIZE if size == FREE else size for size in spec.shape[1:]))
    if spec.dtype == "BYTES":
        return np.full(shape, b"example", dtype=object)
    if spec.numpy_dtype.kind == "f":
        return generator.standard_normal(shape).astype(spec.numpy_dtype)
    # 0 and 1 are valid ids, classes, pixels and truth values alike.
    return generator.integers(0, 2, shape).astype(spec.numpy_dtype)


def open_source(reference: str, declared: Signature | None) -> ModelSource:
    """Import what `reference` names and make it a `ModelSource`.

    Args:
        reference: `package.module:name`; the name may be dotted.
        declared: the signature that the configuration declares, if any. It replaces a
            ModelSource's own.

    Raises:
        ConfigError: it cannot be imported or made, is neither a ModelSource nor a callable, or
            is a callable without a declared signature.
    """
    target = import_reference(reference)
    if inspect.isclass(target) and issubclass(target, ModelSource):
        target = _made(target, reference)
    if isinstance(target, ModelSource):
        if declared is not None:
            target.signature = declared
        elif getattr(target, "signature", None) is None:
            raise ConfigError(f"{reference} has no signature; declare inputs and outputs")
        return target
    if not callable(target):
        raise ConfigError(f"{reference} is {type(target).__name__}, neither a callable nor a ModelSource")
    if declared is None:
        raise ConfigError(f"{reference} is a plain callable, so inputs and outputs must be declared")
    return CallableSource(target, declared, reference)


def _made(source: type[ModelSource], reference: str) -> ModelSource:
    try:
        return source()
    except HalftoneError:
        raise
    except Exception as error:
        raise ConfigError(f"{reference} cannot be made: {type(error).__name__}: {error}") from error


def import_reference(reference: str) -> Any:
    """The object that `package.module:name` names.

    Raises:
        ConfigError: the module raises on import, or has no such name.
    """
    module_name, _, path = reference.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        try:
            target = getattr(target, part)
        except AttributeError as error:
            raise ConfigError(f"{module_name} has no {path}") from error
    return target
