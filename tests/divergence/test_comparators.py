"""Every figure against its formula, computed slowly and with sixty digits."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from serving.divergence.comparators import METRICS, ShapesDiffer, compare
from serving.divergence.formats import BF16, FP16, FP32, FloatFormat
from serving.tensors import Array

FORMATS = st.sampled_from([FP16, BF16, FP32])
SHAPES = array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=7)
FP32_VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False)
FP64_VALUES = st.floats(allow_nan=False, allow_infinity=False)
ANY_VALUES = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 65504.0])
INTEGERS = st.sampled_from(["i1", "u1", "i4", "u4", "i8", "u8", "?"])


@st.composite
def pairs(draw: st.DrawFn, values: st.SearchStrategy[float], dtype: str) -> tuple[Array, Array]:
    """Two arrays of one shape, [rows, ...]: unrelated, near each other, or the same in part."""
    shape = draw(SHAPES)
    reference = draw(arrays(dtype, shape, elements=values))
    with np.errstate(over="ignore"):  # Infinity is a value too.
        near = (reference.astype(np.float64) * 1.001).astype(dtype)
    tier = draw(st.sampled_from([reference, near]) | arrays(dtype, shape, elements=values).map(np.asarray))
    return np.where(np.isfinite(tier), tier, reference), reference


def offline(tier: list[float], reference: list[float], number_format: FloatFormat) -> dict[str, float]:
    """One row's figures, as the formulas are written."""
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 60, 10**6, -(10**6)
        a, b = [Decimal(x) for x in tier], [Decimal(x) for x in reference]
        error = [abs(x - y) for x, y in zip(a, b, strict=True)]
        norm_a, norm_b = (sum((x * x for x in values), Decimal(0)).sqrt() for values in (a, b))
        dot = sum((x * y for x, y in zip(a, b, strict=True)), Decimal(0))
        if norm_a and norm_b:
            cosine = 1 - dot / (norm_a * norm_b)
        else:
            cosine = Decimal(int(bool(norm_a) != bool(norm_b)))
        small, tolerated = (1e-6, 1e-9) if number_format == FP32 else (1e-3, 1e-5)
        # Thresholds are of what FP64 makes of the difference: rounded, and exactly so.
        relative = [
            (math.inf if float(e) > tolerated else 0.0) if abs(y) < small else float(e) / abs(y)
            for e, y in zip(error, reference, strict=True)
        ]
        bits = number_format.significand_bits
        ulps = []
        for e, y in zip(error, b, strict=True):
            exponent = math.frexp(y)[1] - 1 if y else number_format.min_exponent
            ulps.append(e / Decimal(2) ** (max(exponent, number_format.min_exponent) - bits + 1))
        figures = {
            "max_abs": max(error),
            "mean_abs": sum(error, Decimal(0)) / len(error),
            "rel_l2": sum((e * e for e in error), Decimal(0)).sqrt()
            / max(norm_b, Decimal(number_format.smallest_normal)),
            "cosine_distance": cosine,
            "ulp": max(ulps),
        }
        found = {metric: float(min(value, Decimal("1e300"))) for metric, value in figures.items()}
    found["share_1e2"] = sum(x > 1e-2 for x in relative) / len(relative)
    found["share_1e3"] = sum(x > 1e-3 for x in relative) / len(relative)
    if len(tier) == 1:
        found["cosine_distance"] = math.nan
    return found


def assert_as_offline(tier: Array, reference: Array, number_format: FloatFormat) -> None:
    """All figures of all rows."""
    divergence = compare(tier, reference, number_format)
    assert divergence.rows == len(tier)
    assert set(divergence.figures) == set(METRICS)
    assert not divergence.nonfinite.any()
    for row in range(len(tier)):
        wanted = offline(tier[row].ravel().tolist(), reference[row].ravel().tolist(), number_format)
        for metric, figure in wanted.items():
            assert divergence.figures[metric][row] == pytest.approx(figure, 1e-9, 1e-13, True), metric


@given(pairs(FP32_VALUES, "<f4"), FORMATS)
def test_fp32_outputs(pair: tuple[Array, Array], number_format: FloatFormat) -> None:
    """Zero, subnormal and large references among them."""
    assert_as_offline(*pair, number_format)


@given(pairs(FP64_VALUES, "<f8"), FORMATS)
def test_fp64_outputs_of_any_magnitude(pair: tuple[Array, Array], number_format: FloatFormat) -> None:
    """Squares and differences beyond what FP64 holds."""
    assert_as_offline(*pair, number_format)


@given(pairs(ANY_VALUES, "<f4"), pairs(ANY_VALUES, "<f4"))
def test_rows_with_a_value_that_is_no_number(one: tuple[Array, Array], other: tuple[Array, Array]) -> None:
    """Alike on both sides they agree and are left out; otherwise the row is counted, without figures."""
    tier, reference = one[0], other[0]
    if tier.shape != reference.shape:
        reference = np.resize(reference, tier.shape)
    divergence = compare(tier, reference, FP16)
    for row in range(len(tier)):
        a, b = tier[row].ravel().tolist(), reference[row].ravel().tolist()
        unlike = any(
            not (math.isfinite(x) and math.isfinite(y)) and x != y and not (math.isnan(x) and math.isnan(y))
            for x, y in zip(a, b, strict=True)
        )
        assert divergence.nonfinite[row] == unlike
        for metric in METRICS:
            if unlike:
                assert math.isnan(divergence.figures[metric][row])
            elif metric != "cosine_distance":
                assert math.isfinite(divergence.figures[metric][row])


def test_values_that_are_no_numbers_on_both_sides_are_left_out() -> None:
    """The other elements give the figures."""
    tier = np.array([[np.nan, np.inf, -np.inf, 1.5, 2.0]], np.float32)
    reference = np.array([[np.nan, np.inf, -np.inf, 1.0, 2.0]], np.float32)
    figures = compare(tier, reference, FP16).figures
    assert figures["max_abs"] == [0.5]
    assert figures["mean_abs"] == [0.25]
    assert figures["share_1e2"] == [0.5]
    assert figures["rel_l2"] == pytest.approx([0.5 / math.sqrt(5)])


@pytest.mark.parametrize(
    ("one", "other"), [(np.inf, -np.inf), (np.nan, np.inf), (np.nan, 1.0), (65504, np.inf)]
)
def test_a_row_spoils_no_other(one: float, other: float) -> None:
    """Its mates keep their figures."""
    tier = np.array([[1, one], [1, 2]], np.float32)
    reference = np.array([[1, other], [1, 3]], np.float32)
    divergence = compare(tier, reference, FP16)
    assert divergence.nonfinite.tolist() == [True, False]
    assert divergence.figures["max_abs"][1] == 1


@given(st.data(), INTEGERS, SHAPES)
def test_integers_and_booleans_are_subtracted_exactly(
    data: st.DataObject, dtype: str, shape: tuple[int, ...]
) -> None:
    """Those of 64 bits too, of which FP64 holds 53. No tier rounds them: they have no ulp."""
    tier, reference = (data.draw(arrays(dtype, shape)) for _ in range(2))
    divergence = compare(tier, reference, FP16)
    for row in range(len(tier)):
        a, b = (map(int, side[row].ravel().tolist()) for side in (tier, reference))
        errors = [abs(x - y) for x, y in zip(a, b, strict=True)]
        assert divergence.figures["max_abs"][row] == float(max(errors))
        assert (divergence.figures["rel_l2"][row] == 0) == (max(errors) == 0)
        assert math.isnan(divergence.figures["ulp"][row])


def test_neighbouring_integers_of_64_bits_differ() -> None:
    """As FP64 they would be equal."""
    large = np.array([[2**62]], np.int64)
    figures = compare(large, large + 1, FP16).figures
    assert figures["max_abs"] == [1]
    assert figures["rel_l2"] == pytest.approx([2.0**-62])


@pytest.mark.parametrize(("number_format", "dtype"), [(FP16, np.float16), (FP32, np.float32)])
@given(data=st.data())
def test_the_ulp_is_numpy_s(number_format: FloatFormat, dtype: type, data: st.DataObject) -> None:
    """One step of `nextafter` is one ulp; below a power of two, half of the step above."""
    bits = np.dtype(dtype).itemsize * 8
    value = dtype(data.draw(st.floats(width=bits, min_value=0, max_value=float(np.finfo(dtype).max) / 2)))
    above = np.nextafter(value, dtype(np.inf))
    reference, tier = (np.array([[float(x)]], np.float64) for x in (value, above))
    assert compare(tier, reference, number_format).figures["ulp"] == [1]
    assert number_format.ulp(reference)[0, 0] == float(np.spacing(value))


def test_text_is_the_same_or_is_not() -> None:
    """A share of elements; nothing else applies."""
    tier = np.array([[b"a", b"b", b"c", b"d"], [b"", b"", b"", b""]], object)
    reference = np.array([[b"a", b"x", b"c", b"d"], [b"", b"", b"", b""]], object)
    divergence = compare(tier, reference, FP16)
    assert divergence.figures["share_1e2"].tolist() == divergence.figures["share_1e3"].tolist() == [0.25, 0]
    for metric in set(METRICS) - {"share_1e2", "share_1e3"}:
        assert np.isnan(divergence.figures[metric]).all()


@pytest.mark.parametrize("dtype", ["<f4", "<i8", "?", "O"])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3, 0), (0, 0), (0,)])
@pytest.mark.parametrize("kind", [None, "logits"])
def test_nothing_is_no_divergence(dtype: str, shape: tuple[int, ...], kind: str | None) -> None:
    """No rows, or rows of no elements."""
    empty = np.zeros(shape, dtype)
    divergence = compare(empty, empty, FP16, kind)  # type: ignore[arg-type]
    assert divergence.rows == shape[0]
    for values in divergence.figures.values():
        assert not (values > 0).any()


@pytest.mark.parametrize(
    ("tier", "reference"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4))),
        (np.zeros((2, 3)), np.zeros((3, 3))),
        (np.zeros((2, 3)), np.zeros((2, 3, 1))),
        (np.zeros((1, 1), object), np.zeros((1, 1))),
    ],
)
def test_other_shapes_are_not_compared(tier: Array, reference: Array) -> None:
    """Nothing is broadcast."""
    with pytest.raises(ShapesDiffer):
        compare(tier, reference)


def test_large_outputs_are_compared_piece_by_piece() -> None:
    """With the figures of the whole."""
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((5, 700, 600), np.float32)
    tier = reference + rng.standard_normal(reference.shape, np.float32) * np.float32(1e-3)
    whole = compare(tier, reference, FP16, "logits")
    for row in range(5):
        one = compare(tier[row : row + 1], reference[row : row + 1], FP16, "logits")
        for metric in METRICS:
            assert whole.figures[metric][row] == one.figures[metric][0]
        assert whole.top1 is not None
        assert one.top1 is not None
        assert whole.top1[row] == one.top1[0]
        assert whole.top5 is not None
        assert one.top5 is not None
        assert whole.top5[row] == one.top5[0]


@given(pairs(FP32_VALUES, "<f4"))
def test_ranks_agree_as_sorting_says(pair: tuple[Array, Array]) -> None:
    """The tier's first is one of the reference's largest; its five are among the reference's largest five."""
    tier, reference = pair
    divergence = compare(tier, reference, FP16, "logits")
    assert divergence.top1 is not None
    assert divergence.top5 is not None
    for row in range(len(tier)):
        a, b = tier[row].ravel().tolist(), reference[row].ravel().tolist()
        assert divergence.top1[row] == (b[a.index(max(a))] == max(b))
        k = min(5, len(b))
        fifth_of_tier, fifth = sorted(a)[-k], sorted(b)[-k]
        certain = [y for x, y in zip(a, b, strict=True) if x > fifth_of_tier]
        if not all(y >= fifth for y in certain):
            assert not divergence.top5[row]
        if all(y >= fifth for x, y in zip(a, b, strict=True) if x >= fifth_of_tier):
            assert divergence.top5[row]


@pytest.mark.parametrize("kind", [None, "embedding", "regression"])
def test_only_ranked_outputs_have_ranks(kind: str | None) -> None:
    """Logits and probabilities."""
    divergence = compare(np.ones((1, 9)), np.ones((1, 9)), FP16, kind)  # type: ignore[arg-type]
    assert divergence.top1 is None
    assert divergence.top5 is None


def test_an_error_of_scale_hides_from_the_cosine_alone() -> None:
    """Which is why no verdict rests on it."""
    reference = np.array([[1.0, 2.0, 3.0]])
    figures = compare(reference * 1.5, reference, FP16).figures
    assert figures["cosine_distance"] == pytest.approx([0], abs=1e-15)
    assert figures["rel_l2"] == pytest.approx([0.5])
