"""All outputs of some rows, compared: figures and verdicts per output, and the worst of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.divergence.comparators import METRICS, Divergence, Figures, compare
from serving.divergence.formats import FP32, FloatFormat
from serving.divergence.verdict import NAMES, Thresholds, verdicts
from serving.tensors import Tensors, TensorSpec

_DEFAULT_THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One output."""

    divergence: Divergence
    #: [rows]: of `serving.divergence.verdict`.
    verdicts: NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Some rows of a tier against the same rows of the reference."""

    outputs: Mapping[str, OutputComparison]

    @property
    def rows(self) -> int:
        """How many rows were compared."""
        return next(iter(self.outputs.values())).divergence.rows

    def row_figures(self) -> dict[str, Figures]:
        """Metric -> [rows]: the worst of a row's outputs; infinity for a row with NaN on one side only.

        NaN where the metric applies to none of the outputs.
        """
        return {metric: self._worst(metric) for metric in METRICS}

    def _worst(self, metric: str) -> Figures:
        worst = np.full(self.rows, np.nan)
        for output in self.outputs.values():
            worst = np.fmax(worst, output.divergence.figures[metric])
        for output in self.outputs.values():
            worst[output.divergence.nonfinite] = np.inf
        return worst

    def row_verdict(self, row: int) -> str:
        """The worst verdict of one row's outputs."""
        return NAMES[max(int(output.verdicts[row]) for output in self.outputs.values())]

    @property
    def verdict(self) -> str:
        """The worst verdict of all rows and outputs."""
        return NAMES[max(int(output.verdicts.max(initial=0)) for output in self.outputs.values())]


class OutputComparator:
    """Compares a model's outputs."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        formats: Mapping[str, FloatFormat],
        thresholds: Mapping[str, Thresholds],
    ) -> None:
        """`formats`: what each tier rounds to; `thresholds`: by output, where others than the default."""
        self._specs = tuple(specs)
        self._formats = formats
        self._thresholds = thresholds

    def __call__(self, tier: str, found: Tensors, wanted: Tensors) -> Comparison:
        """Compare rows.

        Args:
            tier: whose outputs `found` are.
            found: its outputs, [rows, ...].
            wanted: the reference's outputs for the same rows.

        Raises:
            ShapesDiffer: an output has another shape.
            KeyError: an output is absent.
        """
        outputs = {}
        for spec in self._specs:
            divergence = compare(
                found[spec.name], wanted[spec.name], self._formats.get(tier, FP32), spec.kind
            )
            thresholds = self._thresholds.get(spec.name, _DEFAULT_THRESHOLDS)
            outputs[spec.name] = OutputComparison(divergence, verdicts(divergence, thresholds))
        return Comparison(outputs)
