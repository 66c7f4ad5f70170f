"""Prometheus and promtool, where they are installed.

Without them the tests are skipped with the reason; in CI, where CI is set, they fail.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "http"), str(HERE.parent / "http" / "models")]


def _installed(program: str) -> str:
    path = shutil.which(program)
    if path is not None:
        return path
    reason = f"{program} is not installed: apt-get install prometheus"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def promtool() -> str:
    """Where promtool is."""
    return _installed("promtool")


@pytest.fixture(scope="session")
def prometheus() -> str:
    """Where Prometheus is."""
    return _installed("prometheus")
