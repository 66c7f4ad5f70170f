"""A server of its own process: started, awaited, stopped, with nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S, STOP_TIMEOUT_S = 120.0, 30.0
_LOG_TAIL = 1500


class StartFailed(Exception):
    """A server ended or did not become ready; the message has the end of its output."""


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def why_not(request: urllib.request.Request | str) -> str | None:
    """None where it is answered with 2xx, or else what came back."""
    try:
        with urllib.request.urlopen(request, timeout=10):  # noqa: S310  Our own loopback URL.
            return None
    except urllib.error.HTTPError as error:
        return f"status {error.code}: {error.read()[:300].decode(errors='replace')}"
    except OSError as error:
        return str(error)


@contextmanager
def running(
    command: Sequence[str], log: Path, why_not_ready: Callable[[], str | None], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A server until the block ends: its standard input closes, then it gets SIGINT, then it is killed.

    Args:
        command: to start it.
        log: takes its output.
        why_not_ready: asked until it has no reason left.
        environment: beside this process's own.

    Raises:
        StartFailed: it is not ready in time.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        await_ready(process, log, why_not_ready)
        yield process
    finally:
        stop(process)


def await_ready(process: subprocess.Popen[bytes], log: Path, why_not_ready: Callable[[], str | None]) -> None:
    """Poll until it is ready.

    Raises:
        StartFailed: it ended, or time is up.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (reason := why_not_ready()) is not None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            state = "not ready in time" if process.returncode is None else f"ended with {process.returncode}"
            # Its end, with paths as they are in the repository.
            output = log.read_text(errors="replace")[-_LOG_TAIL:].replace(f"{ROOT}/", "").strip()
            raise StartFailed(f"{state}: {reason}; its output ends: {output}")
        time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it, and what is left of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def halftone(config: Path, log: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """`halftone serve CONFIG` on a free port; `http://host:port` and its process."""
    port = free_port()
    command = [sys.executable, "-m", "serving.cli", "serve", str(config), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running(command, log, lambda: why_not(f"{url}/v2/health/ready"), environment) as process:
        yield url, process.pid
