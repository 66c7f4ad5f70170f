"""What an inference request of the Open Inference Protocol says, decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from serving.tensors import Tensors

if TYPE_CHECKING:
    from serving.protocol.oip import RequestHead

#: What a parameter may hold.
JsonScalar: TypeAlias = str | int | float | bool | None


@dataclass(slots=True, frozen=True)
class OutputRequest:
    """An output that the caller wants, in binary or in JSON."""

    name: str
    binary: bool = False


@dataclass(slots=True)
class InferRequest:
    """A decoded inference request.

    `inputs` stand in the signature's order, each `[rows, ...]`. Those that came in binary
    are read-only views of the body, not necessarily aligned.
    """

    id: str | None
    inputs: Tensors
    rows: int
    parameters: Mapping[str, JsonScalar] = field(default_factory=dict)
    outputs: tuple[OutputRequest, ...] = ()
    #: What its JSON was found to mean; shared by requests with the same JSON.
    head: RequestHead | None = None
