"""The configuration of live comparison: defaults, bounds and contradictions."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from serving.config import parse_config
from serving.config.divergence import Divergence, DivergenceMetric
from serving.divergence.comparators import METRICS
from serving.divergence.verdict import Thresholds
from serving.errors import ConfigError


def divergence(**fields: Any) -> Divergence:
    """With these fields."""
    return Divergence.model_validate(fields)


def test_the_defaults_are_the_contract_s() -> None:
    """One row in twenty, relative L2 at most 0.5 % for 99 % of 1,000 rows; nothing is captured."""
    found = divergence()
    assert (found.sample, found.metric, found.budget, found.quantile, found.window) == (
        0.05,
        "rel_l2",
        5e-3,
        0.99,
        1000,
    )
    assert found.capture is None


def test_the_metrics_are_those_that_are_measured() -> None:
    """Each of them can be a budget's."""
    assert set(get_args(DivergenceMetric)) == set(METRICS)


def test_the_thresholds_are_the_ladder_s() -> None:
    """What is not configured is msprobe's."""
    configured = divergence(thresholds={"y": {}}).thresholds["y"]
    assert Thresholds(**configured.model_dump()) == Thresholds()


@pytest.mark.parametrize(
    ("fields", "enough"),
    [
        ({}, 200),
        ({"window": 50}, 50),
        ({"window": 1}, 1),
        ({"min_samples": 7}, 7),
        ({"min_samples": 1000}, 1000),
    ],
)
def test_a_budget_acts_on_enough_rows(fields: dict[str, Any], enough: int) -> None:
    """200, or the whole of a smaller window."""
    assert divergence(**fields).enough_samples == enough


@pytest.mark.parametrize(
    "fields",
    [
        {"sample": -0.1},
        {"sample": 1.1},
        {"sample": float("nan")},
        {"metric": "cosine"},
        {"budget": 0},
        {"budget": -1},
        {"quantile": 0},
        {"quantile": 1},
        {"window": 0},
        {"window": 100_001},
        {"min_samples": 0},
        {"min_samples": 1001},
        {"recover_ratio": 0},
        {"recover_ratio": 1.1},
        {"cooldown_s": -1},
        {"probe_share": 0},
        {"shadow": {"max_rows": 0}},
        {"shadow": {"max_bytes": 1}},
        {"shadow": {"max_age_s": 0}},
        {"capture": {}},
        {"capture": {"folder": "c", "rows": 0}},
        {"capture": {"folder": "c", "max_bytes": 1}},
        {"thresholds": {"y": {"cosine": 2}}},
        {"thresholds": {"": {}}},
        {"budgets": 1},
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    """Before anything starts."""
    with pytest.raises(ValidationError):
        divergence(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"sample": 0}, {"sample": 1}, {"quantile": 0.5}, {"window": 1}, {"cooldown_s": 0}, {"budget": 1e300}],
)
def test_extreme_values_that_do_are_accepted(fields: dict[str, Any]) -> None:
    """YAML's integers too."""
    assert divergence(**fields)


def test_thresholds_are_of_outputs_that_there_are() -> None:
    """A misspelt one would be without effect."""
    text = """
models:
  - name: m
    source: a:b
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: scores, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {}}
    divergence: {thresholds: {NAME: {max_abs: 0.1}}}
"""
    assert parse_config(text.replace("NAME", "scores"))
    with pytest.raises(ConfigError, match=r"thresholds\.score: no output 'score'; did you mean 'scores'"):
        parse_config(text.replace("NAME", "score"))
