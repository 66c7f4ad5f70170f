"""What comparisons leave in the metrics, and what waits for the hub."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.divergence.comparison import Comparison, OutputComparator
from serving.divergence.formats import FP16
from serving.gateway.precision_record import (
    COARSE_BUCKETS,
    FINE_BUCKETS,
    LARGEST_OBSERVED,
    MAX_PENDING_ROWS,
    PrecisionRecord,
)
from serving.observe.metrics import GatewayMetrics
from serving.tensors import TensorSpec

COMPARE = OutputComparator(
    (TensorSpec("y", "FP32", (-1, 4), "logits"), TensorSpec("z", "FP32", (-1, 1))), {"fp16": FP16}, {}
)


class Record(PrecisionRecord):
    """With its metrics at hand."""

    def __init__(self) -> None:
        self.metrics = GatewayMetrics(CollectorRegistry())
        super().__init__("m", ["fp16"], "rel_l2", 0.01, self.metrics)

    def value(self, name: str, **labels: str) -> float:
        """A sample's value; 0 when there is none."""
        return self.metrics.registry.get_sample_value(name, {"model": "m", **labels}) or 0.0


def comparison(rows: int, scale: float = 1.0, bad: float | None = None) -> Comparison:
    """Rows whose output `y` is off by that factor; the first one with `bad` in it."""
    wanted = {"y": np.tile(np.float32([1, 2, 3, 4]), (rows, 1)), "z": np.ones((rows, 1), np.float32)}
    found = {"y": wanted["y"] * np.float32(scale), "z": wanted["z"].copy()}
    if bad is not None:
        found["y"][0, 0] = bad
    return COMPARE("fp16", found, wanted)


def test_rows_are_observed_by_output_and_metric() -> None:
    """Once each."""
    record = Record()
    record.compared("fp16", comparison(3, 1.5))
    labels = {"tier": "fp16", "output": "y", "metric": "rel_l2"}
    assert record.value("halftone_divergence_count", **labels) == 3
    assert record.value("halftone_divergence_sum", **labels) == pytest.approx(1.5)
    assert record.value("halftone_divergence_count", **labels | {"output": "z"}) == 3
    assert record.value("halftone_divergence_verdict_total", tier="fp16", output="y", verdict="fail") == 3
    assert record.value("halftone_divergence_verdict_total", tier="fp16", output="z", verdict="pass") == 3


def test_the_largest_element_s_changes_are_counted() -> None:
    """For logits."""
    record = Record()
    record.compared("fp16", comparison(2, -1.0))
    assert record.value("halftone_top1_disagreement_total", tier="fp16", output="y") == 2
    assert record.value("halftone_top1_disagreement_total", tier="fp16", output="z") == 0


def test_changes_among_the_five_largest_are_counted() -> None:
    """A change of their order is none; only outputs that are ranked count."""
    wanted = {"y": np.float32([[1, 2, 3, 4, 5, 6]] * 3), "z": np.ones((3, 1), np.float32)}
    found = {name: values.copy() for name, values in wanted.items()}
    found["y"][0, 5] = 4.5  # 6 is the second now.
    found["y"][1, 0] = 2.5  # 1 takes the place of 2.
    compare = OutputComparator(
        (TensorSpec("y", "FP32", (-1, 6), "logits"), TensorSpec("z", "FP32", (-1, 1))), {"fp16": FP16}, {}
    )
    record = Record()
    record.compared("fp16", compare("fp16", found, wanted))
    assert record.value("halftone_top1_disagreement_total", tier="fp16", output="y") == 1
    assert record.value("halftone_top5_disagreement_total", tier="fp16", output="y") == 1
    labels = {"model": "m", "tier": "fp16", "output": "z"}
    assert record.metrics.registry.get_sample_value("halftone_top5_disagreement_total", labels) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_pair_leaves_every_sum_finite(bad: float) -> None:
    """It is counted, and the page parses; the window hears of infinity."""
    record = Record()
    record.compared("fp16", comparison(4, 1.5, bad))
    labels = {"tier": "fp16", "output": "y"}
    assert record.value("halftone_divergence_nonfinite_total", **labels) == 1
    assert record.value("halftone_divergence_count", **labels, metric="rel_l2") == 3
    page = generate_latest(record.metrics.registry).decode()
    sums = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "halftone_divergence_sum"
    ]
    assert sums
    assert np.isfinite(sums).all()
    assert record.take().tiers["fp16"]["rel_l2"] == (np.inf, 0.5, 0.5, 0.5)


def test_an_enormous_figure_leaves_the_sum_able_to_count() -> None:
    """Beyond 1e9 it counts as that: FP64 would add nothing small to more."""
    record = Record()
    labels = {"tier": "fp16", "output": "y", "metric": "rel_l2"}
    record.compared("fp16", comparison(1, 5e37))
    before = record.value("halftone_divergence_sum", **labels)
    assert before == LARGEST_OBSERVED
    record.compared("fp16", comparison(1, 1.001))
    assert record.value("halftone_divergence_sum", **labels) - before == pytest.approx(1e-3, rel=0.01)


def test_a_metric_that_does_not_apply_has_no_series() -> None:
    """One element has no angle."""
    record = Record()
    record.compared("fp16", comparison(1))
    page = generate_latest(record.metrics.registry).decode()
    assert 'metric="cosine_distance",model="m",output="y"' in page
    assert 'metric="cosine_distance",model="m",output="z"' not in page


def test_figures_are_taken_once() -> None:
    """The worst output's, row by row; by tier, and the floor apart."""
    record = Record()
    assert not record.take().is_any
    record.compared("fp16", comparison(2, 1.5))
    record.compared("mixed", comparison(1, 1.25))
    record.floor(comparison(1))
    taken = record.take()
    assert taken.is_any
    assert taken.tiers["fp16"]["rel_l2"] == (0.5, 0.5)
    assert taken.tiers["mixed"]["rel_l2"] == (0.25,)
    assert taken.floor["rel_l2"] == (0.0,)
    assert not record.take().is_any


def test_what_waits_is_bounded() -> None:
    """The newest stay."""
    record = Record()
    record.compared("fp16", comparison(MAX_PENDING_ROWS, 1.5))
    record.compared("fp16", comparison(10, 1.25))
    taken = record.take().tiers["fp16"]["rel_l2"]
    assert len(taken) == MAX_PENDING_ROWS
    assert taken[-10:] == (0.25,) * 10


def test_outcomes_and_twins_are_counted() -> None:
    """By name."""
    record = Record()
    record.outcome("fp16", 8, "dropped")
    record.twins(agree=True)
    record.twins(agree=False)
    assert record.value("halftone_shadow_rows_total", tier="fp16", outcome="dropped") == 8
    assert record.value("halftone_twin_rows_total", outcome="same") == 1
    assert record.value("halftone_twin_rows_total", outcome="different") == 1


def test_the_budget_s_metric_has_fine_buckets() -> None:
    """From 1e-8 to 10, no wider than 6 % where 16 bits are."""
    assert (FINE_BUCKETS[0], FINE_BUCKETS[-1]) == (COARSE_BUCKETS[0], COARSE_BUCKETS[-1]) == (1e-8, 10)
    fine = FINE_BUCKETS[(FINE_BUCKETS >= 1e-6) & (FINE_BUCKETS <= 1)]
    assert (fine[1:] / fine[:-1]).max() < 1.061
    assert set(COARSE_BUCKETS) <= set(FINE_BUCKETS)
    record = Record()
    record.compared("fp16", comparison(1, 1.5))
    (family,) = record.metrics.divergence.collect()
    for metric, bounds in (("rel_l2", FINE_BUCKETS), ("max_abs", COARSE_BUCKETS)):
        buckets = [
            sample
            for sample in family.samples
            if sample.labels["metric"] == metric and "le" in sample.labels and sample.labels["output"] == "y"
        ]
        assert len(buckets) == len(bounds) + 1
