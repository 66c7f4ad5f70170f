"""The simulated card (stub CANN), set up once a session.

Where that is impossible the tests are skipped with the reason; in CI, where CI is set, they fail.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "http")]

import card as simulated  # noqa: E402  Beside this file.


@pytest.fixture(scope="session")
def card() -> simulated.SimulatedCard:
    """The real torch_npu over stand-ins for CANN's libraries, outside this process."""
    try:
        return simulated.set_up()
    except simulated.CardUnavailable as error:
        reason = f"no simulated card (stub CANN): {error}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
