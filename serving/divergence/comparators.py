"""Comparators: figures of how far each row of an output is from the reference's.

With a the tier's elements of one row and b the reference's, both in FP64, ε the smallest normal
number of the tier's format and ulp(x) the distance of its neighbours at |x|:

==================  ==================================================================================
max_abs             max |a - b|
mean_abs            mean |a - b|
rel_l2              ‖a - b‖₂ / max(‖b‖₂, ε)
cosine_distance     1 - a·b / (‖a‖₂ ‖b‖₂); 0 where both are zero, 1 where one is
share_1e2           share of elements with |a - b| / |b| > 1e-2
share_1e3           share of elements with |a - b| / |b| > 1e-3
ulp                 max |a - b| / ulp(b)
==================  ==================================================================================

The shares use |a - b| > 1e-5 instead for elements with |b| < 1e-3 (in FP32: 1e-9 and 1e-6), as the
accuracy checker of Huawei's msprobe does for small values (Ascend/mstt, msprobe,
07.accuracy_checker_PyTorch). Larger is worse in all of them. `cosine_distance` hides an error of
scale and says nothing about a single element, for which it is left out; `max_abs` alone passes any
probabilities: no verdict rests on one of them. Integers and booleans are subtracted exactly, and no
tier rounds them: they have no `ulp`. Of text there are the shares of elements that differ, no more.

Elements that are NaN or infinite on both sides alike agree and are left out of the sums; a row with
one that is not is counted, and its figures are NaN: no histogram may see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.divergence.formats import FP32, FloatFormat
from serving.tensors import Array, OutputKind

METRICS = ("max_abs", "mean_abs", "rel_l2", "cosine_distance", "share_1e2", "share_1e3", "ulp")
#: Kinds of outputs of which the largest element matters.
RANKED_KINDS: frozenset[OutputKind] = frozenset({"logits", "probabilities"})
TOP_K = 5
#: Relative errors that the two shares count.
_COARSE, _FINE = 1e-2, 1e-3
#: No figure exceeds it, so that a sum of many stays finite.
_LARGEST = 1e300
#: Elements that are compared at a time: in FP64, with what is computed of them, some 100 MB.
_CHUNK_ELEMENTS = 1 << 20
_TEXT = "OSU"
_WHOLE = "biu"

Figures = NDArray[np.float64]
Flags = NDArray[np.bool_]


class ShapesDiffer(ValueError):
    """Tier and reference gave outputs of different shapes, or dtypes, for the same rows."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """One output compared, row by row."""

    #: Metric -> [rows]; NaN where it does not apply.
    figures: dict[str, Figures]
    #: [rows]: an element is NaN or infinite on one side, and not the same on the other.
    nonfinite: Flags
    #: [rows]: the largest element is the same; None where outputs are not ranked.
    top1: Flags | None = None
    #: [rows]: the five largest elements are the same, in any order; None as `top1`.
    top5: Flags | None = None

    @property
    def rows(self) -> int:
        """How many rows were compared."""
        return len(self.nonfinite)


def compare(
    tier: Array, reference: Array, number_format: FloatFormat = FP32, kind: OutputKind | None = None
) -> Divergence:
    """Compare one output of the same rows.

    Args:
        tier: the tier's answer, [rows, ...].
        reference: the reference's, of the same shape.
        number_format: what the tier rounds to.
        kind: what the output means.

    Raises:
        ShapesDiffer: their shapes differ, or one of them is text.
    """
    is_text = tier.dtype.kind in _TEXT
    if tier.shape != reference.shape or is_text != (reference.dtype.kind in _TEXT):
        raise ShapesDiffer(f"{tier.dtype}{list(tier.shape)} against {reference.dtype}{list(reference.shape)}")
    rows, elements = len(tier), math.prod(tier.shape[1:])
    # found, wanted: [rows, elements]
    found, wanted = tier.reshape(rows, elements), reference.reshape(rows, elements)
    if is_text:
        return _compare_text(found, wanted)
    is_ranked = kind in RANKED_KINDS and elements > 0
    step = max(1, _CHUNK_ELEMENTS // max(1, elements))
    parts = [
        _compare_numbers(found[row : row + step], wanted[row : row + step], number_format, is_ranked)
        for row in range(0, max(1, rows), step)
    ]
    return parts[0] if len(parts) == 1 else _joined(parts)


def _compare_numbers(
    tier: Array, reference: Array, number_format: FloatFormat, is_ranked: bool
) -> Divergence:
    """Compare [rows, elements] of numbers."""
    found, wanted = tier.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(found) & np.isfinite(wanted)
    agree = finite | (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    nonfinite = ~agree.all(axis=1)
    top1, top5 = _ranks(found, wanted) if is_ranked else (None, None)
    found, wanted = np.where(finite, found, 0.0), np.where(finite, wanted, 0.0)
    is_whole = tier.dtype.kind in _WHOLE and reference.dtype.kind in _WHOLE
    # FP64 outputs may be as far apart as FP64 goes, and their ratio farther: infinity, then `_LARGEST`.
    with np.errstate(over="ignore", divide="ignore"):
        error = _whole_error(tier, reference) if is_whole else np.abs(found - wanted)
        figures = _figures(found, wanted, error, finite, number_format)
    if is_whole:
        figures["ulp"] = np.full(len(found), np.nan)
    for values in figures.values():
        np.minimum(values, _LARGEST, out=values)
        values[nonfinite] = np.nan
    return Divergence(figures, nonfinite, top1, top5)


def _whole_error(tier: Array, reference: Array) -> Figures:
    """|a - b| of integers, exact: FP64 holds no more than 53 of their 64 bits."""
    if {tier.dtype.kind, reference.dtype.kind} == {"i", "u"}:
        return np.abs(tier.astype(np.float64) - reference.astype(np.float64))
    larger, smaller = np.maximum(tier, reference), np.minimum(tier, reference)
    # Modulo 2^64 the difference of two integers of 64 bits is always right.
    return (larger.astype(np.uint64) - smaller.astype(np.uint64)).astype(np.float64)


def _joined(parts: list[Divergence]) -> Divergence:
    """The rows of all parts."""

    def joined(values: Callable[[Divergence], Flags | None]) -> Flags | None:
        found = [part_values for part in parts if (part_values := values(part)) is not None]
        return np.concatenate(found) if found else None

    return Divergence(
        {metric: np.concatenate([part.figures[metric] for part in parts]) for metric in METRICS},
        np.concatenate([part.nonfinite for part in parts]),
        joined(lambda part: part.top1),
        joined(lambda part: part.top5),
    )


def _figures(
    found: Figures, wanted: Figures, error: Figures, counted: Flags, number_format: FloatFormat
) -> dict[str, Figures]:
    """Every metric. Elements that are not `counted` are zero in all three."""
    count = np.maximum(counted.sum(axis=1), 1)
    relative = _relative_errors(error, wanted, number_format)
    distance = _cosine_distance(found, wanted)
    if found.shape[1] == 1:
        distance = np.full(len(found), np.nan)
    return {
        "max_abs": _largest(error),
        "mean_abs": (error / count[:, None]).sum(axis=1),
        "rel_l2": _relative_l2(found, wanted, error, number_format),
        "cosine_distance": distance,
        "share_1e2": (relative > _COARSE).sum(axis=1) / count,
        "share_1e3": (relative > _FINE).sum(axis=1) / count,
        # Halves: the difference of numbers near the largest of FP64 is none.
        "ulp": _largest((found / 2 - wanted / 2) / (number_format.ulp(wanted) / 2)),
    }


def _largest(values: Figures) -> Figures:
    """The largest magnitude of each row; 0 of none."""
    largest: Figures = np.abs(values).max(axis=1, initial=0.0)
    return largest


def _exponents(largest: Figures) -> NDArray[np.int32]:
    """[rows, 1]: the power of two that brings each row's largest magnitude to between 1/2 and 1."""
    exponents: NDArray[np.int32] = np.frexp(largest)[1].astype(np.int32)[:, None]
    return exponents


def _norm(values: Figures) -> Figures:
    """‖row‖₂ of values of which none is far from 1, or all are small."""
    exponents = _exponents(_largest(values))
    norms: Figures = np.sqrt(np.square(np.ldexp(values, -exponents)).sum(axis=1))
    return np.ldexp(norms, exponents[:, 0])


def _relative_l2(found: Figures, wanted: Figures, error: Figures, number_format: FloatFormat) -> Figures:
    """‖a - b‖₂ / max(‖b‖₂, ε), whatever the magnitude: a power of two is taken out of each row first."""
    exponents = _exponents(np.maximum(_largest(found), _largest(wanted)))
    exponents = np.maximum(exponents, number_format.min_exponent)
    # Only scaled, the difference of numbers near the largest of FP64 is a number itself.
    apart = np.ldexp(found, -exponents) - np.ldexp(wanted, -exponents)
    apart = np.where(np.isfinite(error), np.ldexp(error, -exponents), apart)
    least = np.ldexp(number_format.smallest_normal, -exponents[:, 0])
    return _norm(apart) / np.maximum(_norm(np.ldexp(wanted, -exponents)), least)


def _relative_errors(error: Figures, wanted: Figures, number_format: FloatFormat) -> Figures:
    """|a - b| / |b|; of small b, 0 or infinity by whether the absolute error is small too."""
    small_below, small_error = (1e-6, 1e-9) if number_format == FP32 else (1e-3, 1e-5)
    magnitude = np.abs(wanted)
    small = magnitude < small_below
    relative = error / np.where(small, 1.0, magnitude)
    return np.where(small, np.where(error > small_error, np.inf, 0.0), relative)


def _cosine_distance(found: Figures, wanted: Figures) -> Figures:
    """1 - cos, as half the squared distance of the unit vectors: exact for small angles."""
    apart = _unit(found) - _unit(wanted)
    one_is_zero = (_largest(found) > 0) != (_largest(wanted) > 0)
    return np.where(one_is_zero, 1.0, np.square(apart).sum(axis=1) / 2)


def _unit(values: Figures) -> Figures:
    """Rows of length 1, or of zeros."""
    scaled = np.ldexp(values, -_exponents(_largest(values)))
    norms = _norm(scaled)
    return scaled / np.where(norms > 0, norms, 1.0)[:, None]


def _ranks(found: Figures, wanted: Figures) -> tuple[Flags, Flags]:
    """Whether the largest, and the five largest elements agree. Ties in the reference agree."""
    found, wanted = (np.where(np.isnan(values), -np.inf, values) for values in (found, wanted))
    every = np.arange(len(found))
    top1: Flags = np.greater_equal(wanted[every, found.argmax(axis=1)], wanted.max(axis=1))
    k = min(TOP_K, found.shape[1])
    least = np.partition(wanted, -k, axis=1)[:, -k]  # the k-th largest of the reference
    chosen = np.argpartition(found, -k, axis=1)[:, -k:]
    top5: Flags = np.all(np.take_along_axis(wanted, chosen, axis=1) >= least[:, None], axis=1)
    return top1, top5


def _compare_text(found: Array, wanted: Array) -> Divergence:
    """Text either is the same or is not: a share of elements."""
    share = (found != wanted).astype(np.float64).sum(axis=1) / max(1, found.shape[1])
    figures = {metric: np.full(len(found), np.nan) for metric in METRICS}
    figures["share_1e2"] = figures["share_1e3"] = share
    return Divergence(figures, np.zeros(len(found), bool))
