"""Where a request's declaration comes from, and which declarations are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import BadPrecision
from serving.routing.declaration import declared_precision

PARAMETERS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just("fp32"))
HEADERS = st.lists(st.one_of(st.just("fp32"), st.text(st.characters(codec=None))), max_size=3)


def test_nothing_declared() -> None:
    """Then the default answers."""
    assert declared_precision([], None) is None


@pytest.mark.parametrize(
    ("headers", "parameter"),
    [
        (["fp32"], None),
        ([" fp32\t"], None),
        ([], "fp32"),
        ([], " fp32 "),
        (["fp32"], "fp32"),
        (["fp32 "], "fp32"),
    ],
)
def test_the_header_and_the_parameter_are_equal(headers: list[str], parameter: object) -> None:
    """Either, or both when they say the same; spaces around do not count."""
    assert declared_precision(headers, parameter) == "fp32"


@pytest.mark.parametrize(
    ("headers", "parameter", "words"),
    [
        (["fp32", "fp32"], None, "2 times"),
        (["fp32", "fp16", ""], None, "3 times"),
        ([""], None, "empty"),
        ([" "], None, "empty"),
        ([], "", "empty"),
        (["fp32"], "fp16", "X-Precision says 'fp32' and the parameter precision says 'fp16'"),
        (["fp32"], "", "says ''"),
        (["fp32"], "FP32", "'FP32'"),
        ([], True, "as text"),
        ([], 32, "as text"),
        (["fp32"], 1.5, "as text"),
        (["rel_l2<=0"], None, "above zero"),
        (["rel_l2<=nan"], None, "above zero"),
        (["rel_l2<=1e999"], None, "above zero"),
        (["rel_l2<=x"], None, "above zero"),
        (["rel_l2<=-1e-3"], None, "above zero"),
        (["rel_l2<=1_0"], None, "above zero"),
        (["rel_l2<=+1"], None, "above zero"),
        ([], "rel_l2<=\u0661", "above zero"),
        ([], "rel_l2\u3000<=1", "rel_l2<=1e-3"),
        (["rel_l2<1e-3"], None, "rel_l2<=1e-3"),
        (["rel_l2<="], None, "rel_l2<=1e-3"),
        (["<=1e-3"], None, "rel_l2<=1e-3"),
        (["Rel_L2<=1e-3"], None, "rel_l2<=1e-3"),
        (["speed<=1e-3"], None, "not measured; these are: max_abs"),
        ([], "max_abs <= one", "above zero"),
    ],
)
def test_what_is_no_declaration_is_refused(headers: list[str], parameter: object, words: str) -> None:
    """Repeated, empty, contradictory, no text, not served yet."""
    with pytest.raises(BadPrecision, match=words):
        declared_precision(headers, parameter)


@given(HEADERS, PARAMETERS)
def test_a_declaration_is_what_was_said_or_refused(headers: list[str], parameter: object) -> None:
    """Never guessed: no other text comes out than one that went in, and nothing only for nothing."""
    try:
        declared = declared_precision(headers, parameter)
    except BadPrecision:
        return
    said = [value.strip() for value in (*headers, parameter) if isinstance(value, str)]
    assert said == ([] if declared is None else [declared] * len(said))
    assert declared is not None or (not headers and parameter is None)
    assert declared != ""
