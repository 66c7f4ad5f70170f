"""What a request declares about precision: a tier, a sensitivity class, a tolerance, or nothing.

The declaration comes from the `X-Precision` header or from the request's parameter
`precision`. Both may be present only when they say the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from serving.config import DivergenceMetric
from serving.errors import BadPrecision, quote

#: `metric<=bound`. No tier or class can have such a name.
_TOLERANCE = re.compile(r"^([a-z][a-z0-9_]*)[ \t]*<=[ \t]*(\S+)$")
#: `float` takes more than anybody means: `1_0`, digits of other scripts.
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_TOLERANCE_START = re.compile(r"^\S*\s*<")
METRICS: tuple[str, ...] = get_args(DivergenceMetric)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The divergence that a request tolerates."""

    metric: str
    bound: float


def declared_precision(headers: Sequence[str], parameter: object) -> str | Tolerance | None:
    """The precision a request declares, or None when it declares none.

    Args:
        headers: every value of `X-Precision` in the request.
        parameter: the parameter `precision` of the body, None when absent.

    Raises:
        BadPrecision: repeated, empty, not text, contradictory, or no valid tolerance.
    """
    if len(headers) > 1:
        raise BadPrecision(f"X-Precision is given {len(headers)} times; once is enough")
    if parameter is not None and not isinstance(parameter, str):
        raise BadPrecision("the parameter precision is the name of a tier or class, or a tolerance, as text")
    values = [value.strip() for value in (*headers, parameter) if value is not None]
    if not values:
        return None
    if len(values) == 2 and values[0] != values[1]:  # noqa: PLR2004  Header and parameter.
        raise BadPrecision(
            f"X-Precision says {quote(values[0])} and the parameter precision says {quote(values[1])}"
        )
    if not values[0]:
        raise BadPrecision("the declared precision is empty")
    return _tolerance(values[0]) if _TOLERANCE_START.match(values[0]) else values[0]


def _tolerance(text: str) -> Tolerance:
    parts = _TOLERANCE.match(text)
    if parts is None:
        raise BadPrecision(f"{quote(text)} is no tolerance; write it as in rel_l2<=1e-3")
    metric, number = parts.groups()
    if metric not in METRICS:
        raise BadPrecision(f"{quote(metric)} is not measured; these are: {', '.join(METRICS)}")
    bound = positive_number(number)
    if bound is None:
        raise BadPrecision(f"the tolerance {quote(number)} is not a number above zero")
    return Tolerance(metric, bound)


def positive_number(text: str) -> float | None:
    """What a header says in decimal digits, as in `0.5` or `1e-3`; None unless finite and above zero."""
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    return number if math.isfinite(number) and number > 0 else None
