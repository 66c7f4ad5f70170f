"""A running `halftone serve` for tests: started as a person would start it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import client
from prometheus_client.parser import text_string_to_metric_families

MODELS = Path(__file__).parent / "models"
SHARED_MODELS = Path(__file__).parents[1] / "models" / "sources"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
#: Serve's methods that make a replica.
STARTING = ("__init__", "initialize_and_get_metadata")
#: Much longer than the moment between the two.
TITLE_PAUSE_S = 0.2
#: The flag of a socket that listens, in `/proc/net/unix`.
LISTENS = "00010000"


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """`halftone serve CONFIG --port PORT`, with its output in a file."""

    def __init__(
        self,
        folder: Path,
        config: str,
        port: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        temporary: Path | None = None,
    ) -> None:
        """Start it.

        Args:
            folder: for its configuration and its output.
            config: as YAML.
            port: a free one when None.
            environment: beside this process's own; `PYTHONPATH` in it replaces the test models'.
            temporary: where it keeps its temporary files; a folder of its own when None.
        """
        self.port = port or free_port()
        self.config = folder / "config.yaml"
        self.config.write_text(config, encoding="utf-8")
        self.log = folder / "serve.log"
        # Of its own, so that what it leaves behind can be told from others'; short, for sockets.
        self.temporary = temporary or Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
        path = os.pathsep.join(map(str, (MODELS, SHARED_MODELS)))
        own = {"PYTHONPATH": path, **environment, "TMPDIR": str(self.temporary)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serving.cli", "serve", str(self.config), "--port", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own},
                # A group of its own, as a terminal gives each command: a signal reaches all of it.
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    def call(self, method: str, path: str, body: bytes = b"", **headers: str) -> client.Reply:
        """One request; header names are given with underscores."""
        return client.call(self.address, method, path, body, **headers)

    def wait_for_output(self, text: str, times: int = 1) -> None:
        """Wait until the server has printed `text`, so many times."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.output.count(text) < times:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"no {text!r} in the server's output:\n{self.output}")
            time.sleep(0.1)

    def wait_for_metric(self, name: str, value: float) -> None:
        """Wait until a metric's samples add up to `value`."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            page = self.call("GET", "/metrics").body.decode()
            families = text_string_to_metric_families(page)
            found = sum(s.value for family in families for s in family.samples if s.name == name)
            if found == value:
                return
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{name} is {found}, not {value}")
            time.sleep(0.02)

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C to the group, as a terminal does, or another signal to the one process."""
        if self.process.poll() is None:
            send = os.killpg if number == signal.SIGINT else os.kill
            send(self.process.pid, number)
        return self.process.wait(STOP_TIMEOUT_S)

    def processes(self, title: str) -> list[int]:
        """The server's processes whose title holds `title`, such as `halftone:echo:fp16`.

        Not those that still start: they have it too, and Ray adds the method that they run. There are
        two such methods, with a moment in between, so only what is seen twice has started.
        """
        seen = self._titled(title)
        time.sleep(TITLE_PAUSE_S)
        return [pid for pid in self._titled(title) if pid in seen]

    def replicas(self, title: str) -> list[int]:
        """Those of a tier that have loaded: they listen for batches, as their titles do not say."""
        sockets = channel_sockets()
        return [pid for pid in self.processes(title) if sockets & links(Path(f"/proc/{pid}/fd"))]

    def _titled(self, title: str) -> list[int]:
        found = []
        for pid in descendants(self.process.pid):
            try:
                # Behind the title's end there may be the rest of a longer one before it.
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            except OSError:
                continue  # It has just ended.
            if title in command and not any(method in command for method in STARTING) and alive(pid):
                found.append(pid)
        return found

    def leftovers(self) -> list[str]:
        """What it keeps in its temporary folder: sockets, logs."""
        return sorted(path.name for path in self.temporary.iterdir())

    def kill(self) -> None:
        """Make sure that nothing is left when a test failed."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        shutil.rmtree(self.temporary, ignore_errors=True)


def descendants(pid: int) -> set[int]:
    """Every process below `pid`, now."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(tuple(map(int, line.split())) for line in listing.splitlines())
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def channel_sockets() -> set[str]:
    """As `/proc/PID/fd` names them, the sockets that a replica listens on."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    # Number, references, protocol, flags (whether it listens), type, state, inode and name.
    return {
        f"socket:[{line[6]}]"
        for line in lines
        if line[3] == LISTENS and len(line) == 8 and line[7].startswith("@halftone-")
    }


def links(folder: Path) -> set[str]:
    """Where the links in a folder lead. Any of them, or the folder, may be gone by now."""
    found = set()
    with suppress(OSError):
        for link in folder.iterdir():
            with suppress(OSError):
                found.add(str(link.readlink()))
    return found


def alive(pid: int) -> bool:
    """Whether the process runs and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


Start = Callable[..., ServerProcess]


@contextmanager
def ready_server(
    folder: Path,
    config: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    port: int | None = None,
) -> Iterator[ServerProcess]:
    """A server that is ready, and that must stop well."""
    process = ServerProcess(folder, config, port, environment)
    try:
        process.wait_for_output("Try:")
        yield process
        assert process.interrupt() == 0, process.output
    finally:
        process.kill()
