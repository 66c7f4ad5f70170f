"""The page that Prometheus scrapes, written from families.

`prometheus_client` writes the same page at a fifth of the speed: it sorts and escapes every label
at every scrape. Here each series keeps the text before its value. A test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable

from serving.observe.snapshot import Exemplar, Family, Key, number_text

PLAIN_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

#: Beyond it the texts of series that are gone are thrown away with the others.
MAX_KNOWN_SERIES = 200_000
#: Integers below it are written as Python writes a float; beyond it Go has another notation.
_PLAIN_BELOW = 1e6


class PageWriter:
    """Writes pages, and remembers how each series is written."""

    def __init__(self) -> None:
        self._heads: dict[Key, str] = {}

    def write(self, families: Iterable[Family], *, openmetrics: bool = False) -> bytes:
        """The page, in Prometheus text format or in OpenMetrics with exemplars."""
        if len(self._heads) > MAX_KNOWN_SERIES:
            self._heads.clear()
        lines: list[str] = []
        for family in families:
            lines += _preamble(family, openmetrics=openmetrics)
            self._write_samples(family, lines, openmetrics and bool(family.exemplars))
        if openmetrics:
            lines.append("# EOF\n")
        return "".join(lines).encode()

    def _write_samples(self, family: Family, lines: list[str], with_exemplars: bool) -> None:
        heads = self._heads
        for key, value in family.samples.items():
            head = heads.get(key)
            if head is None:
                head = heads[key] = _head(key)
            number = repr(value) if 0.0 <= value < _PLAIN_BELOW else number_text(value)
            if with_exemplars and (exemplar := family.exemplars.get(key)):
                lines.append(f"{head}{number}{_exemplar(exemplar)}\n")
            else:
                lines.append(f"{head}{number}\n")


def _preamble(family: Family, *, openmetrics: bool) -> tuple[str, str]:
    if openmetrics:
        documentation = _escape(family.documentation)
        return f"# HELP {family.name} {documentation}\n", f"# TYPE {family.name} {family.type}\n"
    name = f"{family.name}_total" if family.type == "counter" else family.name
    documentation = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {documentation}\n", f"# TYPE {name} {family.type}\n"


def _head(key: Key) -> str:
    name, labels = key
    if not labels:
        return f"{name} "
    return f"{name}{{{_labels(labels)}}} "


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    return ",".join(f'{label}="{_escape(value)}"' for label, value in labels)


def _exemplar(exemplar: Exemplar) -> str:
    labels, value = _labels(exemplar.labels), number_text(exemplar.value)
    return f" # {{{labels}}} {value} {exemplar.timestamp_s}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
