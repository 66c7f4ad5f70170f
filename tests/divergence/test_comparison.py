"""Several outputs of some rows: the worst of each row, and who is compared how."""

import numpy as np
import pytest

from serving.divergence.comparators import ShapesDiffer
from serving.divergence.comparison import OutputComparator
from serving.divergence.formats import FP16, FP32
from serving.divergence.verdict import Thresholds
from serving.tensors import TensorSpec

SPECS = (
    TensorSpec("scores", "FP32", (-1, 3), "logits"),
    TensorSpec("value", "FP32", (-1, 1), "regression"),
    TensorSpec("label", "BYTES", (-1,)),
)
COMPARE = OutputComparator(SPECS, {"fp16": FP16}, {"value": Thresholds(max_abs=10.0)})


def outputs() -> dict[str, np.ndarray]:
    """Three rows."""
    return {
        "scores": np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32),
        "value": np.array([[1], [2], [3]], np.float32),
        "label": np.array([b"a", b"b", b"c"], object),
    }


def test_the_worst_output_speaks_for_its_row() -> None:
    """Metric by metric; a metric that one output lacks is the others'."""
    tier = outputs()
    tier["scores"][0, 0] = 1.5
    tier["value"][1] = 4.0
    comparison = COMPARE("fp16", tier, outputs())
    assert comparison.rows == 3
    figures = comparison.row_figures()
    assert figures["max_abs"].tolist() == [0.5, 2.0, 0.0]
    assert figures["cosine_distance"][1:].tolist() == [0, 0]  # The value alone has no angle.
    assert figures["share_1e2"].tolist() == [1 / 3, 1.0, 0.0]
    assert [comparison.row_verdict(row) for row in range(3)] == ["fail", "pass", "pass"]
    assert comparison.verdict == "fail"


def test_an_unlike_value_makes_its_row_infinitely_bad() -> None:
    """For the windows: a figure of none would be forgotten."""
    tier = outputs()
    tier["value"][2] = np.nan
    figures = COMPARE("fp16", tier, outputs()).row_figures()
    for values in figures.values():
        assert values[2] == np.inf
        assert np.isfinite(values[:2]).all()


def test_text_fails_where_it_differs() -> None:
    """There is no nearly the same text."""
    tier = outputs()
    tier["label"][1] = b"x"
    comparison = COMPARE("fp16", tier, outputs())
    assert [comparison.row_verdict(row) for row in range(3)] == ["pass", "fail", "pass"]


def test_a_tier_of_no_known_format_counts_as_fp32() -> None:
    """The reference against itself."""
    found, wanted = outputs(), outputs()
    found["value"][0] = np.nextafter(np.float32(1), np.float32(2))
    assert COMPARE("fp32", found, wanted).row_figures()["ulp"][0] == 1
    assert COMPARE("fp16", found, wanted).row_figures()["ulp"][0] == FP32.ulp(np.array([1.0]))[0] / 2**-10


def test_absent_outputs_and_other_shapes_are_refused() -> None:
    """Rather than compared in part."""
    tier = outputs()
    with pytest.raises(KeyError):
        COMPARE("fp16", {"scores": tier["scores"]}, outputs())
    tier["scores"] = tier["scores"][:, :2]
    with pytest.raises(ShapesDiffer):
        COMPARE("fp16", tier, outputs())


def test_other_arrays_beside_the_outputs_are_not_compared() -> None:
    """A guard's flags, say."""
    assert COMPARE("fp16", outputs() | {"#overflow": np.ones(3)}, outputs()).verdict == "pass"
