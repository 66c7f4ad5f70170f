"""`docs/monitoring.md` lists what the code exposes: every metric, with its type and labels."""

from __future__ import annotations

import re

import pytest
from known_metrics import ROOT, exposed, unknown_in

MANUAL = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| `(halftone_\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+\?) \|$", MANUAL, re.MULTILINE
)
QUERIES = re.findall(r"```promql\n(.*?)\n```", MANUAL, re.DOTALL)


def test_the_list_is_the_codes() -> None:
    """No more, no fewer, each once, with a question that it answers."""
    found = [(name, kind, frozenset(labels.split(", "))) for name, kind, labels, *_ in ROWS]
    assert sorted(found) == sorted((name, one.type, one.labels) for name, one in exposed().items())


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_exists(query: str) -> None:
    """Series and labels."""
    assert unknown_in(query) == []


def test_there_are_five_queries() -> None:
    """As its heading says."""
    assert len(QUERIES) == 5


def test_every_file_that_it_links_to_exists() -> None:
    """No dead relative link."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", MANUAL):
        assert (ROOT / "docs" / target).exists(), target


def test_every_metric_says_what_it_is() -> None:
    """On the page itself, for those who look at nothing else."""
    for one in exposed().values():
        assert re.fullmatch(r"[1A-Z].*\.", one.documentation), one.name
