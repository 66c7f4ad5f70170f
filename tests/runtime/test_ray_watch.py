"""A process of Ray's that ends takes the server with it, and the reason is said."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from serving.runtime import ray_watch

#: A process of its own: what `ray_watched` ends is the process that it runs in, and all below it.
PROGRAM = """
import subprocess, sys, time
from pathlib import Path
from serving.runtime.ray_watch import ray_watched

def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

class Node:  # Ray's node, with one real process.
    raylet = sleeper()

    def dead_processes(self):
        return [] if self.raylet.poll() is None else [("raylet", self.raylet)]

    def kill_all_processes(self, **how):
        print("killed", how, flush=True)

node, worker = Node(), sleeper()
with ray_watched(node, Path(sys.argv[1])):
    print(node.raylet.pid, worker.pid, flush=True)
    if not sys.stdin.readline():
        time.sleep(600)  # Nobody says to stop.
print("over", flush=True)
node.raylet.kill()
node.raylet.wait()
worker.kill()
sys.stdin.readline()
"""


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is watched, and its folder `run`."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_without_one_of_ray_s_processes_the_server_ends(
    watched: subprocess.Popen[str], tmp_path: Path
) -> None:
    """With status 1 and a sentence; what is below it is killed, and the folder is gone."""
    assert watched.stdout
    raylet, _worker = map(int, watched.stdout.readline().split())
    os.kill(raylet, signal.SIGKILL)
    out, said = watched.communicate(timeout=30)  # Those below hold both pipes open as long as they live.
    assert watched.returncode == 1
    assert said.startswith("halftone: a process of Ray has ended: raylet (exit status -9); the server cannot")
    assert out.startswith("killed ")
    assert not (tmp_path / "run").exists()


def test_an_orderly_shutdown_is_none(watched: subprocess.Popen[str], tmp_path: Path) -> None:
    """The watch is over before Ray is stopped."""
    assert watched.stdin
    assert watched.stdout
    watched.stdout.readline()
    watched.stdin.write("stop\n")
    watched.stdin.flush()
    assert watched.stdout.readline() == "over\n"
    with pytest.raises(subprocess.TimeoutExpired):
        watched.wait(3 * ray_watch.INTERVAL_S)
    watched.stdin.close()
    assert watched.wait(30) == 0
    assert (tmp_path / "run").is_dir()


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
