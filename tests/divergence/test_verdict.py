"""The ladder, at each of its rungs."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.divergence.comparators import METRICS, Divergence, compare
from serving.divergence.formats import FP16
from serving.divergence.verdict import FAIL, NAMES, PASS, WARN, Thresholds, verdicts


def verdict(thresholds: Thresholds | None = None, **known: Any) -> int:
    """The verdict on a row: figures not given are as of equal outputs, but for a large absolute error."""
    top1, nonfinite = known.pop("top1", None), known.pop("nonfinite", False)
    figures = dict.fromkeys(METRICS, 0.0) | {"max_abs": 1.0} | known
    divergence = Divergence(
        {metric: np.array([value]) for metric, value in figures.items()},
        np.array([nonfinite]),
        None if top1 is None else np.array([top1]),
    )
    return int(verdicts(divergence, thresholds or Thresholds())[0])


def test_equal_outputs_pass() -> None:
    """Whatever they are."""
    outputs = np.array([[1.0, -2.0, np.nan, np.inf]])
    assert verdicts(compare(outputs, outputs, FP16, "logits"), Thresholds()).tolist() == [PASS]
    assert NAMES[PASS] == "pass"


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ({"share_1e3": 0.00099}, PASS),
        ({"share_1e3": 0.001}, WARN),
        ({"share_1e2": 0.0099}, PASS),
        ({"share_1e2": 0.01}, FAIL),
        ({"share_1e2": 0.0099, "share_1e3": 1.0}, WARN),
        ({"cosine_distance": 0.00999}, PASS),
        ({"cosine_distance": 0.0101}, FAIL),
        # A small absolute error passes what the shares would not, and not what the cosine would not.
        ({"max_abs": 0.000999, "share_1e2": 1.0, "share_1e3": 1.0}, PASS),
        ({"max_abs": 0.001, "share_1e2": 1.0}, FAIL),
        ({"max_abs": 0.000999, "cosine_distance": 0.5}, FAIL),
        # A largest element that changed warns, and then a small absolute error excuses nothing.
        ({"top1": False}, WARN),
        ({"top1": True}, PASS),
        ({"top1": False, "max_abs": 0.0001, "share_1e2": 0.01}, FAIL),
        ({"nonfinite": True}, FAIL),
        ({"nonfinite": True, **dict.fromkeys(METRICS, math.nan)}, FAIL),
        (dict.fromkeys(METRICS, math.nan), PASS),
    ],
)
def test_the_rungs(known: dict[str, Any], wanted: int) -> None:
    """Each on both sides of its threshold."""
    assert verdict(**known) == wanted


def test_thresholds_are_those_of_the_model() -> None:
    """Whole models are not operators."""
    loose = Thresholds(cosine=0.5, max_abs=2.0, share_1e2=0.5, share_1e3=0.9)
    assert verdict(loose, share_1e2=1.0, share_1e3=1.0) == PASS
    assert verdict(loose, max_abs=3.0, share_1e2=0.4, share_1e3=0.89) == PASS
    assert verdict(loose, max_abs=3.0, share_1e3=0.9) == WARN
    assert verdict(loose, max_abs=3.0, share_1e2=0.5) == FAIL
    assert verdict(loose, cosine_distance=0.4) == PASS
    assert verdict(loose, cosine_distance=0.5) == FAIL


@given(
    st.fixed_dictionaries({metric: st.floats(0, 2) for metric in METRICS}),
    st.sampled_from(METRICS),
    st.floats(0, 2),
)
def test_a_larger_figure_never_makes_a_better_verdict(
    figures: dict[str, float], metric: str, more: float
) -> None:
    """The ladder is monotone."""
    assert verdict(**(figures | {metric: figures[metric] + more})) >= verdict(**figures)
