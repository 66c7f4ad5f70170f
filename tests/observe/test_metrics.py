"""Names, types and labels of the metrics: the contract with dashboards and alerts."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from serving.observe.histogram import BulkHistogram
from serving.observe.metrics import BATCH_ROWS_BUCKETS, DURATION_BUCKETS_S, GatewayMetrics

TIER = ("model", "tier")
CONTRACT = {
    "halftone_requests": ("counter", (*TIER, "code")),
    "halftone_request_duration_seconds": ("histogram", TIER),
    "halftone_queue_duration_seconds": ("histogram", TIER),
    "halftone_compute_duration_seconds": ("histogram", TIER),
    "halftone_rows": ("counter", TIER),
    "halftone_batch_rows": ("histogram", TIER),
    "halftone_batch_elements": ("counter", (*TIER, "kind")),
    "halftone_batches": ("counter", (*TIER, "via")),
    "halftone_queue_rows": ("gauge", TIER),
    "halftone_inflight_rows": ("gauge", TIER),
    "halftone_routed": ("counter", ("model", "declared", "tier", "reason")),
    "halftone_rejected": ("counter", (*TIER, "reason")),
    "halftone_escalated_rows": ("counter", (*TIER, "cause")),
    "halftone_shadow_rows": ("counter", (*TIER, "outcome")),
    "halftone_budget_exceeded_rows": ("counter", TIER),
    "halftone_divergence": ("histogram", (*TIER, "output", "metric")),
    "halftone_divergence_floor": ("histogram", ("model", "output", "metric")),
    "halftone_divergence_verdict": ("counter", (*TIER, "output", "verdict")),
    "halftone_divergence_nonfinite": ("counter", (*TIER, "output")),
    "halftone_top1_disagreement": ("counter", (*TIER, "output")),
    "halftone_top5_disagreement": ("counter", (*TIER, "output")),
    "halftone_twin_rows": ("counter", ("model", "outcome")),
    "halftone_tier_info": ("gauge", (*TIER, "device", "soc", "effective")),
    "halftone_build_info": ("gauge", ("version", "torch", "torch_npu", "ray")),
}


def families() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> type and labels."""
    metrics = GatewayMetrics(CollectorRegistry())
    instruments = [value for value in vars(metrics).values() if value is not metrics.registry]
    return {
        metric._name: ("histogram", metric._labels)
        if isinstance(metric, BulkHistogram)
        else (metric._type, metric._labelnames)
        for metric in instruments
    }


def test_the_metrics_are_those_of_the_contract() -> None:
    """No more, no fewer; prometheus_client adds `_total` to counters."""
    assert families() == CONTRACT


def test_no_metric_has_a_label_that_a_client_could_fill() -> None:
    """Nor one for the replica: the number of series is fixed by the configuration."""
    labels = {label for _, names in families().values() for label in names}
    assert not labels & {"id", "request_id", "path", "client", "user", "replica", "process", "pid"}


def test_two_registries_share_nothing() -> None:
    """Every process and every test has its own."""
    one, other = GatewayMetrics(CollectorRegistry()), GatewayMetrics(CollectorRegistry())
    one.rows.labels("m", "fp32").inc(3)
    assert b"halftone_rows_total{" in generate_latest(one.registry)
    assert b"halftone_rows_total{" not in generate_latest(other.registry)


@pytest.mark.parametrize("buckets", [DURATION_BUCKETS_S, BATCH_ROWS_BUCKETS])
def test_buckets_rise(buckets: tuple[float, ...]) -> None:
    """As Prometheus wants them."""
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] > 0
