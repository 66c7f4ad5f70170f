"""What a reply says about its precision."""

import numpy as np
import pytest

from serving.divergence.comparison import OutputComparator
from serving.divergence.formats import FP16
from serving.gateway.escalation import Escalation
from serving.gateway.reply_facts import decision_facts, escalation_facts, headers_of, verification_facts
from serving.routing.policy import Decision
from serving.tensors import TensorSpec


def verification(found: object, wanted: object, dtype: str = "float32") -> dict[str, object]:
    """The facts of one output's rows."""
    tier, reference = np.array(found, dtype), np.array(wanted, dtype)
    compare = OutputComparator((TensorSpec("y", "FP32", (-1,)),), {"fp16": FP16}, {})
    return dict(verification_facts(compare("fp16", {"y": tier}, {"y": reference})))


def test_a_fact_is_a_header_and_a_parameter() -> None:
    """Of one name."""
    decision = Decision("fp16", "class=bulk", "bulk")
    facts = decision_facts(decision, "fp16-emulated")
    assert headers_of(facts | escalation_facts(Escalation(2, "saturated"), decision)) == [
        ("x-precision-tier", "fp16"),
        ("x-precision-effective", "fp16-emulated"),
        ("x-precision-reason", "escalated=saturated"),
        ("x-precision-escalated-rows", "2"),
    ]
    assert escalation_facts(None, decision) == {}


def test_the_worst_row_is_told() -> None:
    """Metric by metric."""
    assert verification([[1.5, 0], [1, 1]], [[1, 0], [1, 1]]) == {
        "precision_divergence": "rel_l2=0.5, max_abs=0.5, cosine=1",
        "precision_verdict": "fail",
    }


@pytest.mark.parametrize(
    ("found", "wanted", "text"),
    [
        ([[1.5]], [[1.0]], "rel_l2=0.5, max_abs=0.5"),
        ([[np.nan, 1]], [[1, 1]], "rel_l2=inf, max_abs=inf"),
        ([[np.nan, 1]], [[np.nan, 1]], "rel_l2=0, max_abs=0, cosine=1"),
        ([[0.0, 0.0]], [[1.0, 1.0]], "rel_l2=1, max_abs=1, cosine=0"),
        ([[1.0, 1.0]], [[-1.0, -1.0]], "rel_l2=2, max_abs=2, cosine=-1"),
    ],
)
def test_what_does_not_apply_is_left_out(found: object, wanted: object, text: str) -> None:
    """One element has no angle, nor has a row that cannot be compared."""
    assert verification(found, wanted)["precision_divergence"] == text


def test_text_has_a_share_that_differs() -> None:
    """It has no other figure."""
    facts = verification([[b"a", b"b"]], [[b"a", b"c"]], "O")
    assert facts == {"precision_divergence": "share_1e2=0.5", "precision_verdict": "fail"}


def test_headers_are_plain_ascii() -> None:
    """Whatever the figures."""
    for value in (1e-300, 1e300, -0.0, 65504.0):
        facts = verification([[value, 1.0]], [[1.0, 1.0]], "float64")
        assert all(text.isascii() and text.isprintable() for pair in headers_of(facts) for text in pair)  # type: ignore[arg-type]
