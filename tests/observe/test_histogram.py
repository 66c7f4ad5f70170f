"""The histogram of many figures at once: as `prometheus_client`'s own, observation by observation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serving.observe.histogram import BulkHistogram, log_spaced
from serving.observe.snapshot import take_snapshot

BOUNDS = np.array([0.1, 1.0, 10.0])
FIGURES = st.lists(st.floats(-1, 100) | st.sampled_from([0.1, 1.0, 10.0, 0.0]), max_size=30)


def made() -> tuple[BulkHistogram, CollectorRegistry]:
    """One with a registry of its own."""
    registry = CollectorRegistry()
    return BulkHistogram("h", "Figures.", ("a", "b"), registry), registry


@given(st.lists(st.tuples(st.sampled_from("xy"), FIGURES), max_size=8))
def test_it_counts_as_the_library_s_own(pushed: list[tuple[str, list[float]]]) -> None:
    """Buckets, counts and sums, also of figures at a bucket's end."""
    bulk, registry = made()
    own_registry = CollectorRegistry()
    own = Histogram("h", "Figures.", ("a", "b"), buckets=BOUNDS.tolist(), registry=own_registry)
    for label, figures in pushed:
        bulk.series((label, "1"), BOUNDS).observe_all(np.array(figures))
        for figure in figures:
            own.labels(label, "1").observe(figure)
    names = {
        (sample.name, *sorted(sample.labels.items()))
        for metric in own_registry.collect()
        for sample in metric.samples
    }
    for name, *labels in names:
        if not name.endswith("_created"):
            assert registry.get_sample_value(name, dict(labels)) == pytest.approx(
                own_registry.get_sample_value(name, dict(labels))
            )


def test_what_is_not_finite_is_not_taken() -> None:
    """The sum stays one."""
    bulk, registry = made()
    bulk.series(("x", "1"), BOUNDS).observe_all(np.array([math.nan, math.inf, -math.inf, 0.5]))
    labels = {"a": "x", "b": "1"}
    assert registry.get_sample_value("h_count", labels) == 1
    assert registry.get_sample_value("h_sum", labels) == 0.5


def test_series_may_have_bounds_of_their_own() -> None:
    """Those of the first call stay."""
    bulk, registry = made()
    bulk.series(("x", "1"), BOUNDS).observe_all(np.ones(1))
    bulk.series(("y", "1"), BOUNDS[:1]).observe_all(np.ones(2))
    bulk.series(("x", "1"), BOUNDS[:1]).observe_all(np.ones(1))
    assert registry.get_sample_value("h_bucket", {"a": "x", "b": "1", "le": "1.0"}) == 2
    assert registry.get_sample_value("h_bucket", {"a": "y", "b": "1", "le": "1.0"}) is None
    assert registry.get_sample_value("h_bucket", {"a": "y", "b": "1", "le": "+Inf"}) == 2


def test_both_formats_can_be_written() -> None:
    """And parsed; without series too."""
    bulk, registry = made()
    for _ in range(2):
        families = list(text_string_to_metric_families(generate_openmetrics(registry).decode()))
        assert [(family.name, family.type) for family in families] == [("h", "histogram")]
        assert b"# TYPE h histogram" in generate_latest(registry)
        bulk.series(('a label with "quotes"\n', "1"), BOUNDS).observe_all(np.array([1.0, 2.0]))


def test_a_name_is_registered_once() -> None:
    """As with the library's own."""
    _, registry = made()
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        BulkHistogram("h", "Again.", (), registry)


def test_a_snapshot_has_every_sample() -> None:
    """What travels to the hub."""
    bulk, registry = made()
    bulk.series(("x", "1"), BOUNDS).observe_all(np.array([5.0]))
    (family,) = take_snapshot(registry)
    assert (family.name, family.type, family.is_cumulative) == ("h", "histogram", True)
    assert len(family.samples) == len(BOUNDS) + 3


def test_bounds_are_evenly_spaced_by_ratio() -> None:
    """And read well."""
    assert log_spaced(1e-3, 1.0, 1).tolist() == [1e-3, 1e-2, 1e-1, 1.0]
    assert log_spaced(1e-8, 10.0, 2).tolist()[:3] == [1e-8, 3.162e-8, 1e-7]
    assert len(log_spaced(1e-6, 1.0, 40)) == 241
