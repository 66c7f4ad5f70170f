"""The fault programs can be run by somebody who has not written them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = sorted(path.name for path in HERE.glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_explains_itself(program: str) -> None:
    """`--help`, with an example; and the README has it."""
    command = [sys.executable, str(HERE / program), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"tests/faults/{program} " in done.stdout
    assert f"tests/faults/{program} " in (HERE / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("program", ["slow_client.py", "corrupt_weights.py", "send_row.py", "strike.py"])
def test_wrong_arguments_are_refused(program: str) -> None:
    """Exit status 2, and why."""
    command = [sys.executable, str(HERE / program), "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr
