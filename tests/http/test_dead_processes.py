"""The server's own ground: Ray's processes die, or the server itself is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest
from load import wait_until
from server_process import ServerProcess, Start, alive, descendants

CONFIG = """
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp32: {}}
"""


def named(server: ServerProcess, name: str) -> int:
    """The process of Ray's of that name."""
    [found] = server.processes(f"/{name}")
    return found


@pytest.mark.parametrize("name", ["raylet/raylet", "gcs/gcs_server"])
def test_without_ray_the_server_ends_and_says_why(start: Start, name: str) -> None:
    """Exit status 1 and one sentence; no process, no socket and no folder stays."""
    server = start(CONFIG)
    server.wait_for_output("Try:")
    processes = descendants(server.process.pid)
    began_s = time.monotonic()
    os.kill(named(server, name), signal.SIGKILL)
    assert server.process.wait(30) == 1, server.output
    print(f"ended after {time.monotonic() - began_s:.1f} s")
    assert "halftone: a process of Ray has ended: " in server.output
    assert "the server cannot go on without it" in server.output
    wait_until(lambda: not any(alive(pid) for pid in processes))
    assert server.leftovers() == []


def test_what_a_killed_server_left_is_removed_by_the_next(start: Start) -> None:
    """SIGKILL leaves it no time to. Its processes end by themselves; one that lives keeps its folder."""
    killed = start(CONFIG)
    killed.wait_for_output("Try:")
    # Two of Ray's own agents go on for a minute; they hold nothing of the server's.
    processes = killed.processes("ray::Serve")
    assert len(processes) == 4
    killed.process.kill()
    killed.process.wait()
    gone_s = wait_until(lambda: not any(alive(pid) for pid in processes))
    print(f"its processes were gone after {gone_s:.1f} s")
    [folder] = killed.leftovers()
    living = start(CONFIG, temporary=killed.temporary)
    living.wait_for_output("Try:")
    assert folder not in living.leftovers()
    [own] = living.leftovers()
    next_one = start(CONFIG, temporary=killed.temporary)
    next_one.wait_for_output("Try:")
    assert own in next_one.leftovers()
    assert living.call("GET", "/v2/health/ready").status == 200
    assert next_one.interrupt() == 0
    assert living.interrupt() == 0
    assert killed.leftovers() == []
