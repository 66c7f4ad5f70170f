"""What a gateway has compared: into its metrics, and on to the hub, which keeps every model's windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from serving.divergence.comparators import Divergence, Figures
from serving.divergence.comparison import Comparison
from serving.divergence.standing import RowFigures
from serving.divergence.verdict import NAMES
from serving.observe.histogram import BulkHistogram, log_spaced
from serving.observe.metrics import GatewayMetrics

#: The metric that the budget is about has buckets fine enough for its quantiles, at least from 1e-6
#: to 1, where 16 bits are; the others need only their order of magnitude.
COARSE_BUCKETS = log_spaced(1e-8, 10.0, per_decade=2)
FINE_BUCKETS = np.union1d(log_spaced(1e-6, 1.0, per_decade=40), COARSE_BUCKETS)
#: A figure beyond it counts as it does in a histogram: the sum could not hold small ones any more.
LARGEST_OBSERVED = 1e9
#: Rows that wait to be told to the hub; while it is away, the oldest are lost.
MAX_PENDING_ROWS = 20_000
#: What becomes of a sampled row.
OUTCOMES = ("compared", "dropped", "failed")


@dataclass(slots=True)
class _Pending:
    """Figures that the hub has not been told yet."""

    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, figures: Mapping[str, Figures]) -> None:
        for metric, values in figures.items():
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

    @property
    def is_any(self) -> bool:
        """Whether anything was compared."""
        return any(self.tiers.values()) or bool(self.floor)


class PrecisionRecord:
    """One model's comparisons in this process."""

    def __init__(
        self, model: str, tiers: Iterable[str], budget_metric: str, limit: float, metrics: GatewayMetrics
    ) -> None:
        """Make the record.

        Args:
            model: its name.
            tiers: those that are compared with the reference.
            budget_metric: what the budget is about.
            limit: the budget, of that metric.
            metrics: this process's.
        """
        self._model = model
        self._budget_metric = budget_metric
        self._limit = limit
        self._metrics = metrics
        self._tiers: dict[str, _Pending] = {}
        for tier in tiers:
            # There from the start, at 0: Prometheus sees no rise where a series begins.
            metrics.budget_exceeded_rows.labels(model, tier)
            for outcome in OUTCOMES:
                metrics.shadow_rows.labels(model, tier, outcome)
        self._floor = _Pending()

    def compared(self, tier: str, comparison: Comparison) -> None:
        """Rows of a tier against the reference."""
        figures = comparison.row_figures()
        self._tiers.setdefault(tier, _Pending()).add(figures)
        over = figures[self._budget_metric] > self._limit
        self._metrics.budget_exceeded_rows.labels(self._model, tier).inc(int(over.sum()))
        for name, output in comparison.outputs.items():
            labels = (self._model, tier, name)
            self._observe(self._metrics.divergence, labels, output.divergence)
            for code, verdict in enumerate(NAMES):
                if rows := int((output.verdicts == code).sum()):
                    self._metrics.divergence_verdicts.labels(*labels, verdict).inc(rows)
            self._metrics.divergence_nonfinite.labels(*labels).inc(int(output.divergence.nonfinite.sum()))
            for agree, disagreements in (
                (output.divergence.top1, self._metrics.top1_disagreements),
                (output.divergence.top5, self._metrics.top5_disagreements),
            ):
                if agree is not None:
                    disagreements.labels(*labels).inc(int((~agree).sum()))

    def floor(self, comparison: Comparison) -> None:
        """Rows of the reference against themselves, in another batch."""
        self._floor.add(comparison.row_figures())
        for name, output in comparison.outputs.items():
            self._observe(self._metrics.divergence_floor, (self._model, name), output.divergence)

    def _observe(self, histogram: BulkHistogram, labels: tuple[str, ...], divergence: Divergence) -> None:
        for metric, values in divergence.figures.items():
            if np.isnan(values).all():
                continue  # It does not apply to this output, or to none of these rows.
            bounds = FINE_BUCKETS if metric == self._budget_metric else COARSE_BUCKETS
            histogram.series((*labels, metric), bounds).observe_all(np.minimum(values, LARGEST_OBSERVED))

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
