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
probabilities: no verdict rests on one of them.

Elements that are NaN or infinite on both sides alike agree and are left out of the sums; a row with
one that is not is counted, and its figures are NaN: no histogram may see them.
"""

from __future__ import annotations

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
        ShapesDiffer: their shapes or kinds of dtype differ.
    """
    if tier.shape != reference.shape or (tier.dtype.kind in "OSU") != (reference.dtype.kind in "OSU"):
        raise ShapesDiffer(f"{tier.dtype}{list(tier.shape)} against {reference.dtype}{list(reference.shape)}")
    rows = len(tier)
    if tier.dtype.kind in "OSU":
        return _compare_strings(tier.reshape(rows, -1), reference.reshape(rows, -1))
    # found, wanted: [rows, elements]
    found, wanted = (array.reshape(rows, -1).astype(np.float64) for array in (tier, reference))
    finite = np.isfinite(found) & np.isfinite(wanted)
    agree = finite | (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    nonfinite = ~agree.all(axis=1)
    top1, top5 = _ranks(found, wanted) if kind in RANKED_KINDS else (None, None)
    with np.errstate(over="ignore"):  # FP64 outputs may be as far apart as FP64 goes.
        figures = _figures(np.where(finite, found, 0.0), np.where(finite, wanted, 0.0), finite, number_format)
    for values in figures.values():
        np.minimum(values, _LARGEST, out=values)
        values[nonfinite] = np.nan
    return Divergence(figures, nonfinite, top1, top5)


def _figures(
    found: Figures, wanted: Figures, counted: Flags, number_format: FloatFormat
) -> dict[str, Figures]:
    """Every metric. Elements that are not `counted` are zero in both."""
    error = np.abs(found - wanted)
    count = np.maximum(counted.sum(axis=1), 1)
    scale = np.maximum(_norm(wanted), number_format.smallest_normal)
    relative = _relative_errors(error, wanted, number_format)
    distance = _cosine_distance(found, wanted)
    if found.shape[1] == 1:
        distance = np.full(len(found), np.nan)
    return {
        "max_abs": error.max(axis=1, initial=0.0),
        "mean_abs": error.sum(axis=1) / count,
        "rel_l2": _norm(error) / scale,
        "cosine_distance": distance,
        "share_1e2": (relative > _COARSE).sum(axis=1) / count,
        "share_1e3": (relative > _FINE).sum(axis=1) / count,
        "ulp": (error / number_format.ulp(wanted)).max(axis=1, initial=0.0),
    }


def _norm(values: Figures) -> Figures:
    """‖row‖₂, scaled so that no square overflows or vanishes."""
    largest = np.abs(values).max(axis=1, initial=0.0)
    norms: Figures = largest * np.sqrt(np.square(values / _nonzero(largest)[:, None]).sum(axis=1))
    return norms


def _relative_errors(error: Figures, wanted: Figures, number_format: FloatFormat) -> Figures:
    """|a - b| / |b|; of small b, 0 or infinity by whether the absolute error is small too."""
    small_below, small_error = (1e-6, 1e-9) if number_format == FP32 else (1e-3, 1e-5)
    magnitude = np.abs(wanted)
    small = magnitude < small_below
    relative = error / np.where(small, 1.0, magnitude)
    return np.where(small, np.where(error > small_error, np.inf, 0.0), relative)


def _cosine_distance(found: Figures, wanted: Figures) -> Figures:
    """1 - cos, as half the squared distance of the unit vectors: exact for small angles."""
    found_norm, wanted_norm = _norm(found), _norm(wanted)
    apart = found / _nonzero(found_norm)[:, None] - wanted / _nonzero(wanted_norm)[:, None]
    one_is_zero = (found_norm > 0) != (wanted_norm > 0)
    return np.where(one_is_zero, 1.0, np.square(apart).sum(axis=1) / 2)


def _nonzero(norms: Figures) -> Figures:
    return np.where(norms > 0, norms, 1.0)


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


def _compare_strings(found: Array, wanted: Array) -> Divergence:
    """Text either is the same or is not: a share of elements."""
    share = (found != wanted).astype(np.float64).mean(axis=1)
    figures = {metric: np.full(len(found), np.nan) for metric in METRICS}
    figures["share_1e2"] = figures["share_1e3"] = share
    return Divergence(figures, np.zeros(len(found), bool))
