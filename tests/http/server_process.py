"""A running `halftone serve` for tests: started as a person would start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import client
from prometheus_client.parser import text_string_to_metric_families

MODELS = Path(__file__).parent / "models"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """`halftone serve CONFIG --port PORT`, with its output in a file."""

    def __init__(self, folder: Path, config: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.config = folder / "config.yaml"
        self.config.write_text(config, encoding="utf-8")
        self.log = folder / "serve.log"
        environment = {**os.environ, "PYTHONPATH": str(MODELS)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serving.cli", "serve", str(self.config), "--port", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
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

    def wait_for_output(self, text: str) -> None:
        """Wait until the server has printed `text`."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while text not in self.output:
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

    def interrupt(self) -> int:
        """Ctrl-C. Returns the exit status."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Make sure that nothing is left when a test failed."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
