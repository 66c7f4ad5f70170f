"""One model's measured precision in a gateway: what is known of its tiers, and what follows for requests."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

from serving.config import ModelConfig
from serving.divergence.budget import BudgetRule
from serving.divergence.comparators import ShapesDiffer
from serving.divergence.comparison import Comparison, OutputComparator
from serving.divergence.formats import FORMATS
from serving.divergence.standing import Standing
from serving.divergence.verdict import Thresholds
from serving.errors import ModelError
from serving.gateway.background import Answered, BackgroundBatches, BackgroundTier
from serving.gateway.captures import CaptureFolder
from serving.gateway.precision_record import ModelFigures, PrecisionRecord
from serving.gateway.sampling import sampled_rows
from serving.gateway.shadow import Shadow
from serving.gateway.tier_client import TierDescription
from serving.models.source import ModelSource
from serving.observe.metrics import GatewayMetrics
from serving.routing.declaration import Tolerance
from serving.routing.policy import Decision, RoutingTable
from serving.tensors import Signature, Tensors

logger = logging.getLogger("halftone.precision")

_UNKNOWN = Standing()


def budget_rule(config: ModelConfig) -> BudgetRule:
    """A model's budget as the ledgers want it."""
    divergence = config.divergence
    return BudgetRule(
        metric=divergence.metric,
        limit=divergence.budget,
        quantile=divergence.quantile,
        window=divergence.window,
        min_samples=divergence.enough_samples,
        recover_ratio=divergence.recover_ratio,
        cooldown_s=divergence.cooldown_s,
    )


class ModelPrecision:
    """What a gateway knows about the precision of a model that has a reference."""

    def __init__(
        self, config: ModelConfig, table: RoutingTable, reference: str, metrics: GatewayMetrics
    ) -> None:
        self.reference = reference
        divergence = config.divergence
        compared = [tier for tier in config.tiers if tier != reference]
        self.record = PrecisionRecord(config.name, compared, divergence.metric, divergence.budget, metrics)
        #: As the hub told it last: the whole server's, not this process's.
        self.standings: Mapping[str, Standing] = {}
        self._config = config
        self._table = table
        self._off_duty: frozenset[str] = frozenset()
        self._tiers: Mapping[str, BackgroundTier] = {}
        self._compare: OutputComparator | None = None
        self._shadow: Shadow | None = None
        self._task: asyncio.Task[None] | None = None

    def open(
        self,
        source: ModelSource,
        signature: Signature,
        tiers: Mapping[str, BackgroundTier],
        describe: Callable[[], Mapping[str, TierDescription | None]],
    ) -> None:
        """The model is known: rows can be compared.

        Args:
            source: batches rows.
            signature: what the outputs mean.
            tiers: all of them, by name.
            describe: what they are at this moment, for captures.
        """
        divergence = self._config.divergence
        self._tiers = tiers
        self._compare = OutputComparator(
            signature.outputs,
            {tier: FORMATS[self._config.kind(tier)] for tier in self._config.tiers},
            {output: Thresholds(**rungs.model_dump()) for output, rungs in divergence.thresholds.items()},
        )
        if divergence.sample > 0 and len(tiers) > 1:
            batches = BackgroundBatches(
                tiers,
                self.reference,
                source=source,
                compare=self._compare,
                recorder=self.record,
                max_rows=min(tier.batching.max_rows for tier in self._config.tiers.values()),
                captures=self._captures(describe),
            )
            compared = [tier for tier in tiers if tier != self.reference]
            self._shadow = Shadow(divergence, batches, compared, self.record)

    def _captures(self, describe: Callable[[], Mapping[str, TierDescription | None]]) -> CaptureFolder | None:
        divergence = self._config.divergence
        if divergence.capture is None:
            return None
        return CaptureFolder(
            divergence.capture,
            model=self._config.name,
            reference=self.reference,
            metric=divergence.metric,
            window=divergence.window,
            describe=describe,
        )

    def start(self) -> None:
        """Start comparing."""
        if self._shadow is not None and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._shadow.run())

    async def stop(self) -> None:
        """Stop comparing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def learn(self, standings: Mapping[str, Standing]) -> None:
        """What the hub says."""
        self.standings = standings
        self._off_duty = frozenset(tier for tier, known in standings.items() if known.state != "serving")

    def standing(self, tier: str) -> Standing:
        """What is known of a tier."""
        return self.standings.get(tier, _UNKNOWN)

    def within_budget(self, decision: Decision, request_id: str) -> Decision:
        """The decision, or a more precise tier's where its own is over its budget."""
        if not self._off_duty:
            return decision
        declared = decision.tier
        return self._table.within_budget(
            decision,
            lambda tier: (
                self._may_serve(tier, request_id) and (tier == declared or self._tiers[tier].is_ready)
            ),
        )

    def is_within_budget(self, tier: str) -> bool:
        """Whether a tier may be chosen in the place of a more precise one."""
        return tier == self.reference or self.standing(tier).state == "serving"

    def _may_serve(self, tier: str, request_id: str) -> bool:
        state = self.standing(tier).state
        if state == "probing":
            # Another hash than the sample's, or every probe would be a sampled request.
            return bool(sampled_rows(f"probe {request_id}", 1, self._config.divergence.probe_share))
        return state == "serving"

    def decide_tolerance(self, tolerance: Tolerance) -> Decision:
        """The cheapest tier that is known to keep within a tolerance."""
        return self._table.decide_tolerance(tolerance, self.bound)

    def bound(self, tier: str, metric: str) -> float:
        """What a tier's divergence does not exceed; infinity if unknown, over its budget, or not ready."""
        known = self.standing(tier)
        measured = known.metrics.get(metric)
        if measured is None or known.state != "serving" or not self._tiers[tier].is_ready:
            return math.inf
        return measured.bound

    def offer(self, request_id: str, decision: Decision, tensors: Tensors, outputs: Tensors) -> None:
        """Sample an answered request's rows for comparison."""
        if self._shadow is None:
            return
        try:
            answered = Answered(request_id, decision.tier, tensors, outputs)
            self._shadow.offer(answered, decision.passed_over)
        except Exception:  # The model's own code chooses batches; the caller's answer stands.
            logger.exception("the rows of request %s cannot be sampled", request_id)

    async def compare(self, tier: str, found: Tensors, wanted: Tensors) -> Comparison:
        """Compare an answer with the reference's, off the event loop.

        Raises:
            ModelError: they have other shapes.
        """
        if self._compare is None:
            raise RuntimeError("the model is not open")
        try:
            return await asyncio.to_thread(self._compare, tier, found, wanted)
        except (ShapesDiffer, KeyError) as error:
            raise ModelError("the model's outputs have other shapes at the reference") from error

    def take_figures(self) -> ModelFigures:
        """What the hub has not been told yet."""
        return self.record.take()
