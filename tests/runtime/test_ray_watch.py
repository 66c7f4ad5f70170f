"""A process of Ray's that ends takes the server with it, and the reason is said."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from serving.runtime import ray_watch
from serving.runtime.ray_watch import ray_watched


class Node:
    """Ray's node, with one real process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.killed: list[dict[str, bool]] = []

    def dead_processes(self) -> list[tuple[str, Any]]:
        return [] if self.process.poll() is None else [("raylet", self.process)]

    def kill_all_processes(self, **how: bool) -> None:
        self.killed.append(how)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set when the process would have ended; its statuses."""
    monkeypatch.setattr(ray_watch, "INTERVAL_S", 0.01)
    event = threading.Event()
    event.statuses = []  # type: ignore[attr-defined]

    def end(status: int) -> None:
        event.statuses.append(status)  # type: ignore[attr-defined]
        event.set()

    monkeypatch.setattr(ray_watch.os, "_exit", end)
    return event


def test_without_one_of_ray_s_processes_the_server_ends(
    ended: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 1; what is left of Ray is killed, and the folder is gone."""
    node = Node()
    folder = tmp_path / "run"
    folder.mkdir()
    with ray_watched(node, folder):
        assert not ended.wait(0.1)
        node.process.kill()
        assert ended.wait(30)
    assert ended.statuses == [1]
    assert node.killed
    assert not folder.exists()
    said = capsys.readouterr().err
    assert said.startswith("halftone: a process of Ray has ended: raylet (exit status -9); the server cannot")


def test_an_orderly_shutdown_is_none(ended: Any, tmp_path: Path) -> None:
    """The watch is over before Ray is stopped."""
    node = Node()
    with ray_watched(node, tmp_path):
        pass
    node.process.kill()
    node.process.wait()
    assert not ended.wait(0.1)
    assert node.killed == []
    assert tmp_path.is_dir()


def test_processes_below_are_found() -> None:
    """Children and theirs, and nobody else's."""
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline_s = time.monotonic() + 30
        while not ray_watch._descendants(child.pid):
            assert time.monotonic() < deadline_s
        [grandchild] = ray_watch._descendants(child.pid)
        assert {child.pid, grandchild} <= ray_watch._descendants(os.getpid())
    finally:
        for pid in (*ray_watch._descendants(child.pid), child.pid):
            os.kill(pid, signal.SIGKILL)
        child.wait()
