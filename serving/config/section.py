"""What all parts of the configuration have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

#: Names that reach URLs, headers and metric labels. No `<`, `>` or `=`: those make a tolerance.
NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
TensorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}$")]


class Section(BaseModel):
    """A part of the configuration: frozen, and no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)
