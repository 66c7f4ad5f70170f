"""The engine of a tier replica: the converted model on its device. Knows torch, not ray.

All methods run on the replica's one device thread.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from serving.errors import ConfigError, DeviceOutOfMemory, ModelError, RequestError
from serving.gateway.tier_client import BatchResult, TierDescription
from serving.models.resolve import open_source
from serving.models.source import ModelSource
from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.precision import PrecisionSpec
from serving.numerics.probe import admit, attest
from serving.numerics.tier_module import TierModule
from serving.runtime.tier_plan import TierPlan
from serving.tensors import Array, Tensors, TensorSpec, row_count, slice_rows

logger = logging.getLogger("halftone.tier")

_HASH_CHUNK_BYTES = 1 << 20
_BUILD_SEED = 0


#: How far a known answer may lie from the one at start, in relative L2. The same batch on the
#: same kernels repeats to the bit on most devices, and is garbage on a broken one.
KNOWN_ANSWER_TOLERANCE = 1e-3


@dataclass(slots=True)
class Engine:
    """A loaded tier."""

    source: ModelSource
    spec: PrecisionSpec
    device: Device
    module: TierModule
    description: TierDescription
    #: The model's examples, preprocessed, and what they gave at start.
    example: Tensors
    known_answer: Tensors

    @classmethod
    def load(cls, plan: TierPlan, source: ModelSource) -> Self:
        """Load, attest, convert and warm up.

        Raises:
            ConfigError: the device, the weights or the conversion is refused.
            PrecisionUnavailable: the device cannot honour the tier, or the probe measured less.
            ModelError: the model does not run on its own examples.
        """
        config = plan.config
        spec = PrecisionSpec(
            kind=plan.kind,
            native=config.native,
            keep_fp32=config.keep_fp32,
            on_weight_loss=config.on_weight_loss,
        )
        device = open_device(
            plan.device, plan.threads, plan.card, tier=plan.kind, accept_degraded=config.accept_degraded
        )
        attestation = attest(spec, device)
        effective = admit(spec, device, attestation, accept_degraded=config.accept_degraded)
        module = build_module(source)
        if plan.model.weights is not None:
            load_weights(module, plan.model.weights, plan.model.sha256)
        example = source.preprocess(source.examples())
        with device.running():
            converted = convert(module, spec, device, device.to_device(list(example.values())))
        description = TierDescription(
            device=device.kind,
            soc=device.title,
            effective=effective,
            kept_fp32=converted.kept_fp32,
            weight_losses=tuple(str(loss) for loss in converted.weight_losses),
            switches=dict(device.switches),
            measured={name: str(value) for name, value in asdict(attestation).items()},
        )
        engine = cls(source, spec, device, converted, description, example, {})
        engine.known_answer = engine.repeatable_answer()
        return engine

    def run(self, batch: Tensors) -> BatchResult:
        """Compute one batch; one that does not fit in the device's memory, in halves.

        Args:
            batch: model tensors, each [rows, ...], in the order of the module's arguments.

        Raises:
            ModelError: the model raised, or its outputs are not those of its signature.
            DeviceOutOfMemory: not even one row fits.
            DeviceLost: the device failed; this engine is finished.
        """
        started_s = time.perf_counter()
        rows = row_count(batch)
        try:
            outputs = self._forward(batch, rows)
        except DeviceOutOfMemory:
            if rows == 1:
                raise
            logger.warning("a batch of %d rows did not fit in memory; running it in halves", rows)
            halves = (slice_rows(batch, 0, rows // 2), slice_rows(batch, rows // 2, rows))
            parts = [self.run(half).outputs for half in halves]
            outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return BatchResult(outputs, time.perf_counter() - started_s)

    def _forward(self, batch: Tensors, rows: int) -> Tensors:
        try:
            with self.device.running():
                returned = self.module(*self.device.to_device(list(batch.values())))
                return self._outputs(returned, rows)
        except RequestError:
            raise
        except BaseException as error:  # SystemExit and StopIteration too: it is foreign code.
            logger.exception("the model raised")
            raise ModelError("the model raised on this batch; the tier's log has the details") from error

    def repeatable_answer(self) -> Tensors:
        """What the model says to its examples, where it says the same twice; else nothing.

        A model that draws random numbers, keeps state or answers NaN has no known answer.
        """
        first, second = (self.run(self.example).outputs for _ in range(2))
        repeats = all(_relative_l2(second[name], first[name]) <= KNOWN_ANSWER_TOLERANCE for name in first)
        if not repeats:
            logger.warning("the model answers its own examples differently each time: no known answer")
        return first if repeats else {}

    def altered(self) -> str | None:
        """Whether anything lowered the arithmetic since the start: the model's own code, say.

        Every switch is read again, and the probe computes again.
        """
        changed = [
            f"{name} is {value}, was {self.device.switches.get(name)}"
            for name, value in self.device.read_switches().items()
            if value != self.device.switches.get(name)
        ]
        if changed:
            return f"a switch was changed after the start: {'; '.join(changed)}"
        with self.device.running():
            measured = attest(self.spec, self.device).effective
        if measured != self.description.effective:
            return f"the probe measures {measured} now; it was {self.description.effective} at the start"
        return None

    def broken(self) -> str | None:
        """Whether the replica computes wrongly: its known answer, again.

        Only a device that failed gives another one: see `repeatable_answer`.
        """
        if not self.device.healthy():
            return f"{self.device.title} no longer computes a known product"
        if not self.known_answer:
            return None
        for name, answer in self.run(self.example).outputs.items():
            distance = _relative_l2(answer, self.known_answer[name])
            if not distance <= KNOWN_ANSWER_TOLERANCE:
                return f"the known answer {name} is off by {distance:.1e}"
        return None

    def _outputs(self, returned: Any, rows: int) -> Tensors:
        specs = self.source.signature.outputs
        tensors = _by_order(returned, specs)
        return {
            spec.name: _checked_output(spec, self.device.to_host(tensor), rows)
            for spec, tensor in zip(specs, tensors, strict=True)
        }


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


def _relative_l2(found: Array, expected: Array) -> float:
    """‖found - expected‖₂ / ‖expected‖₂; of other shapes, infinite."""
    if found.shape != expected.shape:
        return math.inf
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(found - wide) / max(float(np.linalg.norm(wide)), sys.float_info.min))


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
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(f"the model's parameter {name} is {dtype}; a source gives an FP32 module")
    return module.eval().requires_grad_(False)


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
