"""A served model as a gateway sees it: its lanes, one per tier, and when they are ready."""

from __future__ import annotations

from prometheus_client import Counter

from serving.config import ModelConfig
from serving.errors import NotReady, Overloaded, PrecisionUnavailable
from serving.gateway.coalescer import Coalescer, Limits
from serving.gateway.precision import ModelPrecision
from serving.gateway.tier_client import OVERFLOW_CAUSES, TierClient, TierDescription
from serving.models.source import ModelSource
from serving.observe.metrics import DURATION_BUCKETS_S, GatewayMetrics
from serving.protocol.oip import HeadCache
from serving.routing.policy import Decision, RoutingTable
from serving.tensors import Signature, Tensors

#: The problem of a tier that no replica has reported on yet.
LOADING = "loading"
#: The problem of a tier whose replicas have stopped answering.
LOST = "no replica answers; Serve is starting another"


class LaneMetrics:
    """One tier's metrics, bound once: looking labels up costs more than counting."""

    def __init__(self, metrics: GatewayMetrics, model: str, tier: str) -> None:
        self.answered = metrics.requests.labels(model, tier, "200")
        self.request_duration = metrics.request_duration.series((model, tier), DURATION_BUCKETS_S)
        self._queue_duration = metrics.queue_duration.series((model, tier), DURATION_BUCKETS_S)
        self._compute_duration = metrics.compute_duration.labels(model, tier)
        self._rows = metrics.rows.labels(model, tier)
        self._elements = metrics.batch_elements.labels(model, tier, "own")
        self._padding = metrics.batch_elements.labels(model, tier, "padding")
        self._batch_rows = metrics.batch_rows.labels(model, tier)
        self._queue_rows = metrics.queue_rows.labels(model, tier)
        self._inflight_rows = metrics.inflight_rows.labels(model, tier)
        # There from the start, at 0: Prometheus sees no rise where a series begins.
        metrics.rejected.labels(model, tier, Overloaded.code)
        for cause in OVERFLOW_CAUSES.values():
            metrics.escalated_rows.labels(model, tier, cause)

    def follow(self, coalescer: Coalescer) -> None:
        """Ask a queue for its length whenever the metrics are read."""
        self._queue_rows.set_function(lambda: coalescer.queue_rows)
        self._inflight_rows.set_function(lambda: coalescer.inflight_rows)

    def started(self, waited_s: float) -> None:
        """A request's first row left the queue."""
        self._queue_duration.observe(waited_s)

    def batch(self, rows: int, compute_s: float) -> None:
        """A batch came back."""
        self._rows.inc(rows)
        self._batch_rows.observe(rows)
        self._compute_duration.observe(compute_s)

    def padded(self, elements: int, padding: int) -> None:
        """A batch was made."""
        self._elements.inc(elements - padding)
        self._padding.inc(padding)


class Lane:
    """One tier of one model: the way from the gateway to its replicas."""

    def __init__(self, model: ModelConfig, tier: str, client: TierClient, metrics: GatewayMetrics) -> None:
        self.model_name = model.name
        self.tier = tier
        self.kind = model.kind(tier)
        self.config = model.tiers[tier]
        self.client = client
        self.metrics = LaneMetrics(metrics, model.name, tier)
        #: None until a replica has started.
        self.description: TierDescription | None = None
        #: Whether the last report did not come: the replica that Serve asked may be gone, or hang.
        self.is_silent = False
        #: None until the model's source is known.
        self.coalescer: Coalescer | None = None

    def open(self, source: ModelSource) -> None:
        """Start taking rows."""
        batching = self.config.batching
        limits = Limits(
            max_rows=batching.max_rows,
            max_wait_s=batching.max_wait_ms / 1000,
            max_queue_rows=self.config.max_queue_rows,
            max_queue_bytes=self.config.max_queue_bytes,
            replicas=self.config.replicas,
            target_s=batching.target_ms / 1000 if batching.target_ms is not None else None,
        )
        self.coalescer = Coalescer(self.client, limits, self.metrics, source.collate, source.batch_key)
        self.metrics.follow(self.coalescer)

    def has_room(self, rows: int, size_bytes: int) -> bool:
        """Whether the tier answers, and would admit a request of this size now."""
        return self.is_ready and self.coalescer is not None and self.coalescer.has_room(rows, size_bytes)

    async def run_background(self, batch: Tensors) -> Tensors:
        """Compute a batch that nobody waits for.

        Raises:
            NotReady: the tier does not serve, or has other rows to compute.
            RequestError: what it answered.
        """
        if self.coalescer is None or not self.is_ready:
            raise NotReady(f"tier {self.tier} of {self.model_name} does not serve")
        return await self.coalescer.run_background(batch)

    @property
    def is_lost(self) -> bool:
        """Whether its replicas have stopped answering, until one reports again or is connected."""
        return self.is_silent and not self.client.connected

    @property
    def problem(self) -> str | None:
        """Why the tier does not answer and ought to; None when it does, or never will."""
        if self.description is None:
            return LOADING
        if self.is_lost:
            return LOST
        return self.description.failure

    @property
    def is_ready(self) -> bool:
        """Whether the tier answers."""
        return self.problem is None and self.description is not None and not self.description.unavailable

    def ready_coalescer(self) -> tuple[Coalescer, TierDescription]:
        """The open queue and what the tier is.

        Raises:
            NotReady: it is loading, or failed to start.
            PrecisionUnavailable: the device cannot honour it.
        """
        description = self.description
        if self.coalescer is None or description is None:
            raise NotReady(f"tier {self.tier} of {self.model_name} is still loading")
        if description.unavailable is not None:
            raise PrecisionUnavailable(description.unavailable)
        if self.is_lost:
            raise NotReady(f"tier {self.tier} of {self.model_name}: {LOST}")
        if description.failure is not None:
            raise NotReady(
                f"tier {self.tier} of {self.model_name} failed to start; /v2/health/ready says why"
            )
        return self.coalescer, description


class ServedModel:
    """One model: its routing and its lanes. The signature is known once a tier has loaded."""

    def __init__(self, config: ModelConfig, clients: dict[str, TierClient], metrics: GatewayMetrics) -> None:
        self.config = config
        self.name = config.name
        self.table = RoutingTable.of(config)
        self.metrics = metrics
        self._routed: dict[Decision, Counter] = {}
        #: None where the model has no reference to compare with.
        self.precision = (
            ModelPrecision(config, self.table, self.table.reference, metrics)
            if self.table.reference is not None
            else None
        )
        #: What its callers' JSON was found to mean.
        self.heads = HeadCache()
        self.lanes = {tier: Lane(config, tier, client, metrics) for tier, client in clients.items()}
        #: The most rows that any of its queues could hold.
        self.max_rows = max(tier.max_queue_rows for tier in config.tiers.values())
        self.signature: Signature | None = None
        self.source: ModelSource | None = None
        #: A few rows of real input, for callers to try.
        self.example: Tensors = {}
        #: Whether requests need the source's own preprocessing, off the event loop.
        self.preprocesses = False
        #: Inputs that may hold NaN and infinity.
        self.nonfinite_inputs: frozenset[str] = frozenset()

    def routed(self, decision: Decision) -> Counter:
        """The counter of requests with this decision, bound to its labels once."""
        counter = self._routed.get(decision)
        if counter is None:
            counter = self.metrics.routed.labels(self.name, decision.declared, decision.tier, decision.reason)
            self._routed[decision] = counter
        return counter

    def open(self, source: ModelSource, signature: Signature) -> None:
        """The source is known: requests can be decoded and rows queued."""
        self.source = source
        self.signature = signature
        self.nonfinite_inputs = frozenset(spec.name for spec in signature.inputs if spec.allow_nonfinite)
        self.preprocesses = type(source).preprocess is not ModelSource.preprocess
        for lane in self.lanes.values():
            lane.open(source)
        if self.precision is not None:
            self.precision.open(
                source,
                signature,
                self.lanes,
                lambda: {tier: lane.description for tier, lane in self.lanes.items()},
            )

    def ready_signature(self) -> Signature:
        """The signature.

        Raises:
            NotReady: no tier has loaded yet.
        """
        if self.signature is None:
            raise NotReady(f"model {self.name} is still loading")
        return self.signature

    @property
    def problems(self) -> dict[str, str]:
        """Tier -> why it does not answer."""
        return {tier: problem for tier, lane in self.lanes.items() if (problem := lane.problem)}
