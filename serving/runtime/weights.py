"""A tier's FP32 master weights: the source's module, and what a weights file puts into it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from serving.errors import ConfigError
from serving.models.source import ModelSource

_HASH_CHUNK_BYTES = 1 << 20
_BUILD_SEED = 0


def build_module(source: ModelSource) -> torch.nn.Module:
    """The source's module, in eval mode and without gradients.

    Every process builds its own: the seed makes a source that initialises weights at random
    give the same model to all of them.

    Raises:
        ConfigError: a parameter is not FP32, so there are no FP32 master weights.
    """
    torch.manual_seed(_BUILD_SEED)
    module = source.build()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)  # One by one: TorchScript has it for parameters only.
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(f"the model's parameter {name} is {dtype}; a source gives an FP32 module")
    return module.eval()


def load_weights(module: torch.nn.Module, path: Path, sha256: str | None) -> None:
    """Load a safetensors file into a module: every parameter and buffer, no more, no less.

    Raises:
        ConfigError: the file is missing, corrupt, no safetensors, of another hash, or does not
            fit the module. Nothing in it is ever executed.
    """
    from safetensors import SafetensorError  # noqa: PLC0415  Only models with a weights file.
    from safetensors.torch import load_file  # noqa: PLC0415

    try:
        if sha256 is not None and (found := _sha256(path)) != sha256:
            raise ConfigError(f"{path} has the SHA-256 {found}, not the configured one")
        module.load_state_dict(load_file(path), strict=True)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigError(f"{path} is not a valid safetensors file: {error}") from error
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit the model: {error}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
