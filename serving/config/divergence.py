"""The configuration of live comparison with the reference, and of the budget that acts on it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from serving.config.section import Section, TensorName

DivergenceMetric = Literal[
    "max_abs", "mean_abs", "rel_l2", "cosine_distance", "share_1e2", "share_1e3", "ulp"
]


class Shadow(Section):
    """Bounds of what waits to be compared, per gateway."""

    max_rows: int = Field(default=4096, ge=1, le=2**24)
    max_bytes: int = Field(default=67_108_864, ge=1024)
    max_age_s: float = Field(
        default=30.0, gt=0, le=3600, description="A row for which no replica was idle this long is dropped."
    )


class VerdictThresholds(Section):
    """What a row's verdict needs; the defaults are those of Huawei's msprobe for single operators."""

    cosine: float = Field(default=0.99, ge=-1, le=1, description="At most this fails.")
    max_abs: float = Field(default=1e-3, ge=0, description="Below this passes.")
    share_1e2: float = Field(
        default=0.01, ge=0, le=1, description="This share of elements off by over 1 % fails."
    )
    share_1e3: float = Field(
        default=0.001, ge=0, le=1, description="This share of elements off by over 0.1 % warns."
    )


class CaptureConfig(Section):
    """Where the worst rows are kept. They hold what callers sent: off by default."""

    folder: Path = Field(strict=False, description="Made with access for this user only.")
    max_bytes: int = Field(default=268_435_456, ge=1024, description="The oldest captures make room.")
    rows: int = Field(default=16, ge=1, le=10_000, description="Of each window and tier, per gateway.")
    redact: tuple[TensorName, ...] = Field(
        default=(),
        strict=False,
        description="Model tensors to leave out; such a row cannot be replayed. Where a name is none of "
        "them, as of an input that is preprocessed, all are left out.",
    )


class Divergence(Section):
    """Live comparison with the reference, and the budget that acts on it."""

    sample: float = Field(default=0.05, ge=0, le=1, description="Share of answered rows that are compared.")
    metric: DivergenceMetric = Field(default="rel_l2", description="What the budget is about.")
    budget: float = Field(default=5.0e-3, gt=0, description="What the metric's quantile may be.")
    quantile: float = Field(default=0.99, gt=0, lt=1)
    window: int = Field(default=1000, ge=1, le=100_000, description="Compared rows that count.")
    min_samples: int | None = Field(
        default=None, ge=1, description="Rows before the budget acts; 200, or the window if that is less."
    )
    recover_ratio: float = Field(
        default=0.8, gt=0, le=1, description="A tripped tier recovers at this share of the budget."
    )
    cooldown_s: float = Field(
        default=30.0, ge=0, le=86400, description="A trip lasts at least this long; relapses double it."
    )
    probe_share: float = Field(
        default=0.1, gt=0, le=1, description="Share of its requests that a recovering tier answers."
    )
    thresholds: dict[TensorName, VerdictThresholds] = Field(
        default_factory=dict, description="By output; msprobe's for the others."
    )
    shadow: Shadow = Shadow()
    capture: CaptureConfig | None = None

    @property
    def enough_samples(self) -> int:
        """Rows before the budget acts."""
        return min(self.window, self.min_samples or 200)

    @model_validator(mode="after")
    def _the_window_holds_enough(self) -> Self:
        if self.min_samples is not None and self.min_samples > self.window:
            raise ValueError(f"min_samples, {self.min_samples}, is more than the window of {self.window}")
        return self
