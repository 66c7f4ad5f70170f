"""A divergence capture: a row that a tier and the reference disagreed on, with all it takes to see why.

One safetensors file: the row's model tensors, both answers, and metadata as JSON. Nothing in it is
executable, and it is read back with every size checked by the format's own library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from serving.errors import ConfigError
from serving.tensors import Array, Tensors

_METADATA_KEY = "halftone"
_INPUT, _TIER, _REFERENCE = "input/", "tier/", "reference/"


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """What is known about a captured row, besides its tensors."""

    model: str
    tier: str
    reference: str
    #: Decided that the row was compared.
    request_id: str
    captured_at: str
    #: Metric -> figure; None where it does not apply.
    figures: Mapping[str, float | None]
    verdict: str
    #: Package -> version, of the gateway's machine.
    versions: Mapping[str, str]
    #: Tier -> its device, effective precision and switches, as its replica read them back.
    tiers: Mapping[str, Mapping[str, Any]]
    #: Inputs that were left out: such a row cannot be replayed.
    redacted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured row."""

    facts: CaptureFacts
    #: Model tensors, [1, ...]; without those that were redacted.
    inputs: Tensors
    #: What the tier answered, and what the reference did.
    tier_outputs: Tensors
    reference_outputs: Tensors

    def encode(self) -> bytes:
        """The file's bytes."""
        arrays = {
            prefix + name: np.ascontiguousarray(array)
            for prefix, tensors in (
                (_INPUT, self.inputs),
                (_TIER, self.tier_outputs),
                (_REFERENCE, self.reference_outputs),
            )
            for name, array in tensors.items()
        }
        return save(arrays, {_METADATA_KEY: json.dumps(asdict(self.facts))})


_FACTS = TypeAdapter(CaptureFacts)


def can_be_captured(*tensors: Tensors) -> bool:
    """Whether the format has a place for all of them: it has none for text."""
    return all(array.dtype.kind in "biuf" for some in tensors for array in some.values())


def read_capture(path: Path) -> Capture:
    """Read a capture.

    Raises:
        ConfigError: the file is missing, or is none.
    """
    try:
        with safe_open(path, "numpy") as file:
            facts = json.loads((file.metadata() or {})[_METADATA_KEY])
            arrays: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        parts = (_named(arrays, prefix) for prefix in (_INPUT, _TIER, _REFERENCE))
        return Capture(_FACTS.validate_python(facts), *parts)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no divergence capture: {error}") from error


def _named(arrays: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
