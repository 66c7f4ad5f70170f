"""The engine of a tier replica: the converted model on its device. Knows torch, not ray.

All methods run on the replica's one device thread.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from serving.errors import ConfigError, ModelError, RequestError
from serving.gateway.tier_client import BatchResult, TierDescription
from serving.models.resolve import open_source
from serving.models.source import ModelSource
from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.precision import PrecisionSpec
from serving.numerics.probe import attest, expected
from serving.numerics.tier_module import TierModule
from serving.runtime.tier_plan import TierPlan
from serving.tensors import Array, Tensors, TensorSpec, row_count

logger = logging.getLogger("halftone.tier")

_HASH_CHUNK_BYTES = 1 << 20


@dataclass(slots=True)
class Engine:
    """A loaded tier."""

    source: ModelSource
    device: Device
    module: TierModule
    description: TierDescription

    @classmethod
    def load(cls, plan: TierPlan, source: ModelSource) -> Self:
        """Load, convert, attest and warm up.

        Raises:
            ConfigError: the weights, the conversion or the attestation is refused.
            ModelError: the model does not run on its own examples.
        """
        config = plan.config
        device = open_device(_device_kind(config.device or plan.model.device), plan.threads)
        module = source.build().eval().requires_grad_(False)
        if plan.model.weights is not None:
            load_weights(module, plan.model.weights, plan.model.sha256)
        spec = PrecisionSpec(
            kind=plan.kind,
            native=config.native,
            keep_fp32=config.keep_fp32,
            on_weight_loss=config.on_weight_loss,
        )
        attestation = attest(spec, device)
        allowed = expected(spec, device)
        if attestation.effective not in allowed:
            raise ConfigError(
                f"the probe measured {attestation.effective}; "
                f"a {plan.kind} tier is {' or '.join(sorted(allowed))}"
            )
        examples = source.preprocess(source.examples())
        tier_module = convert(module, spec, device, device.to_device(list(examples.values())))
        description = TierDescription(
            device=device.kind,
            soc=device.name,
            effective=attestation.effective,
            kept_fp32=tier_module.kept_fp32,
            weight_losses=tuple(str(loss) for loss in tier_module.weight_losses),
            switches=dict(device.switches),
        )
        engine = cls(source, device, tier_module, description)
        engine.run(examples)
        return engine

    def run(self, batch: Tensors) -> BatchResult:
        """Compute one batch.

        Args:
            batch: model tensors, each [rows, ...], in the order of the module's arguments.

        Raises:
            ModelError: the model raised, or its outputs are not those of its signature.
        """
        started_s = time.perf_counter()
        try:
            arguments = self.device.to_device(list(batch.values()))
            returned = self.module(*arguments)
        except RequestError:
            raise
        except Exception as error:
            logger.exception("the model raised")
            raise ModelError("the model raised on this batch; the tier's log has the details") from error
        outputs = self._outputs(returned, row_count(batch))
        return BatchResult(outputs, time.perf_counter() - started_s)

    def _outputs(self, returned: Any, rows: int) -> Tensors:
        specs = self.source.signature.outputs
        tensors = _by_order(returned, specs)
        return {
            spec.name: _checked_output(spec, self.device.to_host(tensor), rows)
            for spec, tensor in zip(specs, tensors, strict=True)
        }


def _device_kind(configured: str) -> str:
    """The kind of device to open: `auto` is the CPU, the only one served in this version."""
    return "cpu" if configured == "auto" else configured


def _by_order(returned: Any, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """What a module returned, as tensors in the order of the signature's outputs."""
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


def _checked_output(spec: TensorSpec, array: Array, rows: int) -> Array:
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


def open_plan_source(plan: TierPlan) -> ModelSource:
    """The plan's model source."""
    return open_source(plan.model.source, plan.model.declared_signature())
