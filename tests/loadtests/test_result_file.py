"""What measurements keep."""

import json
from pathlib import Path

import pytest

from loadtests import result_file


def test_a_result_says_when_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one of a day replaces the first."""
    monkeypatch.setattr(result_file, "RESULTS", tmp_path)
    for figure in (1, 2):
        name = result_file.keep("soak", {**result_file.conditions(), "figure": figure})
    [written] = tmp_path.iterdir()
    kept = json.loads(written.read_text())
    assert written.name == name == f"soak-{kept['date'][:10]}.json"
    assert kept["figure"] == 2
    assert kept["machine"]["cores"] >= 1
    assert len(kept["load_average"]) == 3
