"""The metrics one process records. Names, labels and units are a contract.

Text that a client sent never becomes a label: model, tier and declared names come from
the configuration, and whatever a client names beyond it counts under `other`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.observe.histogram import BulkHistogram

#: Label value for what a client named and nobody configured.
OTHER = "other"
#: Tier label of requests that were refused before a tier was decided.
NO_TIER = "none"

# 0.5 ms to 30 s: an echo on loopback up to the default request timeout.
DURATION_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
BATCH_ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class GatewayMetrics:
    """What a gateway counts: everything about requests, queues and batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        tier = ("model", "tier")
        self.requests = Counter("halftone_requests", "Requests answered.", (*tier, "code"), registry=registry)
        self.request_duration = BulkHistogram(
            "halftone_request_duration_seconds",
            "From the parsed head of a request to its answer.",
            tier,
            registry,
        )
        self.queue_duration = BulkHistogram(
            "halftone_queue_duration_seconds",
            "From a request's arrival in its tier's queue to the call that carries its first row.",
            tier,
            registry,
        )
        self.compute_duration = Histogram(
            "halftone_compute_duration_seconds",
            "Forward pass of one batch on the device, copies included.",
            tier,
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self.rows = Counter("halftone_rows", "Rows computed and answered.", tier, registry=registry)
        self.batch_rows = Histogram(
            "halftone_batch_rows", "Rows of one batch.", tier, buckets=BATCH_ROWS_BUCKETS, registry=registry
        )
        self.batch_elements = Counter(
            "halftone_batch_elements",
            "Elements of the batches that were sent: the requests' own, and what made them equally long.",
            (*tier, "kind"),
            registry=registry,
        )
        self.batches = Counter(
            "halftone_batches",
            "Batches sent: directly to a replica, or by a Serve call where none is connected.",
            (*tier, "via"),
            registry=registry,
        )
        self.queue_rows = Gauge(
            "halftone_queue_rows", "Rows admitted and not yet sent to the tier.", tier, registry=registry
        )
        self.inflight_rows = Gauge(
            "halftone_inflight_rows", "Rows sent to the tier and not yet back.", tier, registry=registry
        )
        self.routed = Counter(
            "halftone_routed",
            "Requests by what they declared and the tier that this bound them to.",
            ("model", "declared", "tier", "reason"),
            registry=registry,
        )
        self.rejected = Counter(
            "halftone_rejected", "Requests refused, by error code.", (*tier, "reason"), registry=registry
        )
        self.escalated_rows = Counter(
            "halftone_escalated_rows",
            "Rows that overflowed their tier's number format.",
            (*tier, "cause"),
            registry=registry,
        )
        self.shadow_rows = Counter(
            "halftone_shadow_rows",
            "Sampled rows: compared with the reference, dropped because it was busy, or failed.",
            (*tier, "outcome"),
            registry=registry,
        )
        self.budget_exceeded_rows = Counter(
            "halftone_budget_exceeded_rows",
            "Compared rows whose divergence, by the budget's metric, was over the budget.",
            tier,
            registry=registry,
        )
        self.divergence = BulkHistogram(
            "halftone_divergence",
            "How far a row of a tier's output is from the reference's, by metric.",
            (*tier, "output", "metric"),
            registry,
        )
        self.divergence_floor = BulkHistogram(
            "halftone_divergence_floor",
            "How far a row of the reference's output is from itself in another batch.",
            ("model", "output", "metric"),
            registry,
        )
        self.divergence_verdicts = Counter(
            "halftone_divergence_verdict",
            "Compared rows by verdict: pass, warn or fail.",
            (*tier, "output", "verdict"),
            registry=registry,
        )
        self.divergence_nonfinite = Counter(
            "halftone_divergence_nonfinite",
            "Compared rows with NaN or infinity on one side only.",
            (*tier, "output"),
            registry=registry,
        )
        self.top1_disagreements = Counter(
            "halftone_top1_disagreement",
            "Compared rows whose largest element is another one than the reference's.",
            (*tier, "output"),
            registry=registry,
        )
        self.top5_disagreements = Counter(
            "halftone_top5_disagreement",
            "Compared rows whose five largest elements are not the reference's, in whatever order.",
            (*tier, "output"),
            registry=registry,
        )
        self.twin_rows = Counter(
            "halftone_twin_rows",
            "Rows that the reference computed twice in one batch: with the same answer, or different ones.",
            ("model", "outcome"),
            registry=registry,
        )
        self.tier_info = Gauge(
            "halftone_tier_info",
            "1 for each tier: its device and the precision that the probe measured.",
            (*tier, "device", "soc", "effective"),
            registry=registry,
        )
        self.build_info = Gauge(
            "halftone_build_info",
            "1, with the versions that run.",
            ("version", "torch", "torch_npu", "ray"),
            registry=registry,
        )
