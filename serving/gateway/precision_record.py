"""What a gateway has compared: into its metrics, and on to the hub, which keeps every model's windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.divergence.comparators import Divergence
from serving.divergence.comparison import Comparison
from serving.divergence.standing import RowFigures
from serving.divergence.verdict import NAMES
from serving.observe.histogram import BulkHistogram, log_spaced
from serving.observe.metrics import GatewayMetrics

#: The metric that the budget is about has buckets fine enough for its quantiles; the others need
#: only their order of magnitude.
FINE_BUCKETS = log_spaced(1e-8, 10.0, per_decade=20)
COARSE_BUCKETS = log_spaced(1e-8, 10.0, per_decade=2)
#: Rows that wait for the hub; while it is away, the oldest are lost.
MAX_PENDING_ROWS = 20_000


@dataclass(slots=True)
class _Pending:
    """Figures that the hub has not been told yet."""

    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, comparison: Comparison) -> None:
        for metric, values in comparison.row_figures().items():
            known = self.figures.setdefault(metric, [])
            known.extend(values.tolist())
            del known[:-MAX_PENDING_ROWS]

    def take(self) -> RowFigures:
        taken, self.figures = self.figures, {}
        return {metric: tuple(values) for metric, values in taken.items()}


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One model's figures since the last beat."""

    tiers: Mapping[str, RowFigures]
    floor: RowFigures


class PrecisionRecord:
    """One model's comparisons in this process."""

    def __init__(self, model: str, budget_metric: str, metrics: GatewayMetrics) -> None:
        self._model = model
        self._budget_metric = budget_metric
        self._metrics = metrics
        self._tiers: dict[str, _Pending] = {}
        self._floor = _Pending()

    def compared(self, tier: str, comparison: Comparison) -> None:
        """Rows of a tier against the reference."""
        self._tiers.setdefault(tier, _Pending()).add(comparison)
        for name, output in comparison.outputs.items():
            labels = (self._model, tier, name)
            self._observe(self._metrics.divergence, labels, output.divergence)
            for code, verdict in enumerate(NAMES):
                if rows := int((output.verdicts == code).sum()):
                    self._metrics.divergence_verdicts.labels(*labels, verdict).inc(rows)
            self._metrics.divergence_nonfinite.labels(*labels).inc(int(output.divergence.nonfinite.sum()))
            if output.divergence.top1 is not None:
                self._metrics.top1_disagreements.labels(*labels).inc(int((~output.divergence.top1).sum()))

    def floor(self, comparison: Comparison) -> None:
        """Rows of the reference against themselves, in another batch."""
        self._floor.add(comparison)
        for name, output in comparison.outputs.items():
            self._observe(self._metrics.divergence_floor, (self._model, name), output.divergence)

    def _observe(self, histogram: BulkHistogram, labels: tuple[str, ...], divergence: Divergence) -> None:
        for metric, values in divergence.figures.items():
            if np.isnan(values).all():
                continue  # It does not apply to this output, or to none of these rows.
            bounds = FINE_BUCKETS if metric == self._budget_metric else COARSE_BUCKETS
            histogram.observe((*labels, metric), bounds, values)

    def twins(self, agree: bool) -> None:
        """Whether one row, twice in a batch, gave one answer."""
        self._metrics.twin_rows.labels(self._model, "same" if agree else "different").inc()

    def outcome(self, tier: str, rows: int, outcome: str) -> None:
        """What became of sampled rows: compared, dropped or failed."""
        self._metrics.shadow_rows.labels(self._model, tier, outcome).inc(rows)

    def take(self) -> ModelFigures:
        """What the hub has not been told yet."""
        return ModelFigures(
            {tier: pending.take() for tier, pending in self._tiers.items()}, self._floor.take()
        )
