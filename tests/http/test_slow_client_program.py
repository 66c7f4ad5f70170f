"""`tests/faults/slow_client.py` on a running server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from server_process import ServerProcess

PROGRAM = Path(__file__).parents[1] / "faults" / "slow_client.py"


def test_a_slow_body_is_let_go_and_others_are_answered(server: ServerProcess) -> None:
    """At `body_timeout_s`, here 2 s."""
    command = [sys.executable, str(PROGRAM), "body", "--model", "classifier", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "body: let go after" in done.stdout
