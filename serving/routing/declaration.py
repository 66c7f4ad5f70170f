"""What a request declares about precision: a tier, a sensitivity class, or nothing.

The declaration comes from the `X-Precision` header or from the request's parameter
`precision`. Both may be present only when they say the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serving.errors import BadPrecision, quote

#: `metric<=bound`: a tolerance on the measured divergence.
_TOLERANCE = re.compile(r"^[a-z][a-z0-9_]*\s*<=")


def declared_precision(headers: Sequence[str], parameter: object) -> str | None:
    """The precision a request declares, or None when it declares none.

    Args:
        headers: every value of `X-Precision` in the request.
        parameter: the parameter `precision` of the body, None when absent.

    Raises:
        BadPrecision: repeated, empty, not text, contradictory, or a tolerance.
    """
    if len(headers) > 1:
        raise BadPrecision(f"X-Precision is given {len(headers)} times; once is enough")
    if parameter is not None and not isinstance(parameter, str):
        raise BadPrecision("the parameter precision is the name of a tier or class, as text")
    values = [value.strip() for value in (*headers, parameter) if value is not None]
    if not values:
        return None
    if len(values) == 2 and values[0] != values[1]:  # noqa: PLR2004  Header and parameter.
        raise BadPrecision(
            f"X-Precision says {quote(values[0])} and the parameter precision says {quote(values[1])}"
        )
    if not values[0]:
        raise BadPrecision("the declared precision is empty")
    if _TOLERANCE.match(values[0]):
        raise BadPrecision("tolerances such as rel_l2<=1e-3 are not served yet; declare a tier or a class")
    return values[0]
