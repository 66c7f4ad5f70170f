"""What is printed at start: the table of tiers, and lines that can be pasted."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from serving.config import Config
from serving.runtime.summary import _table, relative_l2, say_conversion, summarise

VECTORS = arrays(np.float64, st.integers(1, 8), elements=st.floats(-1e6, 1e6))


@given(VECTORS)
def test_nothing_is_at_no_distance_from_itself(vector: Any) -> None:
    """Zeros included."""
    assert relative_l2(vector, vector) == 0


@given(VECTORS.filter(lambda vector: np.linalg.norm(vector) > 1e-3), st.floats(-10, 10))
def test_the_distance_of_a_multiple_is_its_relative_error(vector: Any, factor: float) -> None:
    """Whatever the scale."""
    assert relative_l2(vector * factor, vector) == pytest.approx(abs(factor - 1), abs=1e-9)


def test_a_distance_to_zero_is_large_and_finite_or_zero() -> None:
    """No division by zero."""
    zeros = np.zeros(3)
    assert relative_l2(zeros, zeros) == 0
    assert relative_l2(np.full(3, 1e-100), zeros) > 1
    assert math.isnan(relative_l2(np.array([np.nan]), np.ones(1)))


@given(
    st.integers(1, 4).flatmap(
        lambda columns: st.lists(
            st.tuples(*[st.text(st.characters(categories=["L", "N"]), min_size=1)] * columns), min_size=1
        )
    )
)
def test_a_tables_columns_are_aligned(rows: list[tuple[str, ...]]) -> None:
    """Each as wide as its widest cell; no line ends in spaces."""
    lines = _table(rows).split("\n")
    assert len(lines) == len(rows)
    for column in range(len(rows[0])):
        start = 2 + sum(max(len(row[before]) for row in rows) + 2 for before in range(column))
        for line, row in zip(lines, rows, strict=True):
            assert line[start : start + len(row[column])] == row[column]
            assert line == line.rstrip()


class FakeClient:
    """A server with three tiers, one of which failed."""

    url = "http://127.0.0.1:8000"
    curl_options = ""
    ready: dict[str, Any] = {"replicas": 1, "device": "cpu", "ready": True}  # noqa: RUF012  Only read.

    def __init__(self, values: dict[str, list[float]]) -> None:
        self.values = values

    def get(self, path: str) -> tuple[int, Any]:
        """The model's metadata, or its example."""
        if path.endswith("/example"):
            return 200, {"inputs": []}
        if path != "/v2/models/m":
            return 503, {"error": "still loading"}
        tiers = {
            tier: {**self.ready, "effective": f"{tier}-measured"} if tier in self.values else
            {"replicas": 1, "ready": False}
            for tier in ("fp32", "fp16", "mixed")
        }  # fmt: skip
        tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
        return 200, {"inputs": [tensor], "outputs": [tensor], "tiers": tiers}

    def infer(self, model: str, body: Any, precision: str) -> tuple[int, dict[str, str], Any]:
        """A tier's values."""
        assert (model, body) == ("m", {"inputs": []})
        return 200, {}, {"outputs": [{"name": "y", "datatype": "FP32", "data": self.values[precision]}]}


def printed(values: dict[str, list[float]]) -> list[str]:
    """The lines for models `m`, which answers, and `n`, which does not."""
    tiers: dict[str, Any] = {"fp32": {}, "fp16": {}, "mixed": {}}
    model = {"source": "a:b", "tiers": tiers, "classes": {"critical": "fp32"}}
    config = Config.model_validate({"models": [{"name": "m", **model}, {"name": "n", **model}]})
    lines: list[str] = []
    summarise(config, FakeClient(values), lines.append)  # type: ignore[arg-type]
    return "\n".join(lines).split("\n")


def row(lines: list[str], tier: str) -> list[str]:
    """A tier's cells."""
    (line,) = [line for line in lines if line.split()[:1] == [tier]]
    return line.split()


def test_each_tier_is_shown_with_its_measured_precision_and_difference() -> None:
    """Against FP32, on the model's own example."""
    lines = printed({"fp32": [3, 4], "fp16": [3, 4.05]})
    assert "model m  (x: FP32 [-1, 2] -> x: FP32 [-1, 2])" in lines
    assert row(lines, "fp32")[4:5] == ["fp32-measured"]
    assert row(lines, "fp32")[-1] == "reference"
    assert row(lines, "fp16")[4:5] == ["fp16-measured"]
    assert row(lines, "fp16")[-1] == "1.0e-02"


def test_a_tier_that_failed_is_shown_without_figures() -> None:
    """The line stays; a model that does not answer has none."""
    lines = printed({"fp32": [3, 4], "fp16": [3, 4]})
    assert row(lines, "mixed")[2] == "-"
    assert row(lines, "mixed")[-2:] == ["-", "-"]
    assert not any("model n" in line for line in lines)


def test_without_a_reference_there_is_no_difference() -> None:
    """FP32 failed: nothing to compare with."""
    assert row(printed({"fp16": [3, 4]}), "fp16")[-1] == "-"


def test_every_tier_and_a_class_can_be_tried() -> None:
    """By lines of curl."""
    lines = [line.strip() for line in printed({"fp32": [1], "fp16": [1]})]
    url = "http://127.0.0.1:8000/v2/models/m"
    assert f"curl -s {url}/example > sample.json" in lines
    for name in ("fp32", "fp16", "mixed", "critical"):
        assert f"curl -si {url}/infer -H 'X-Precision: {name}' --json @sample.json" in lines


def test_what_a_conversion_kept_is_said_briefly() -> None:
    """Three names, then a number."""
    model = Config.model_validate({"models": [{"name": "m", "source": "a:b", "tiers": {"fp16": {}}}]}).models[
        0
    ]
    said: list[str] = []
    facts = {"weight_losses": ["x", "y"], "kept_fp32": ["a", "b", "c", "d", "e"]}
    say_conversion(model, "fp16", facts, said.append)
    assert said == [
        "  fp16: 16 bits cannot hold some weights of 2 tensors (GET /v2/models/m lists them)",
        "  fp16: stay FP32: a, b, c and 2 more",
    ]
    say_conversion(model, "fp32", {}, said.append)
    assert len(said) == 2
