"""`halftone serve`: start everything, say what stands, wait for a signal, drain, leave nothing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from serving.config import Config
from serving.gateway.model import LOADING
from serving.runtime.cluster import local_cluster, reserved_port
from serving.runtime.local_client import LocalClient
from serving.runtime.summary import summarise

if TYPE_CHECKING:
    from serving.runtime.application import RunningApplication

#: For every tier to load. Large models on slow disks take minutes.
READY_TIMEOUT_S = 1800.0
_POLL_INTERVAL_S = 0.2

Printer = Callable[[str], None]


def serve(config: Config, say: Printer) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        HalftoneError: the port is taken, resources are missing, or a process failed to start.
        KeyboardInterrupt: a second signal came while the first was being obeyed.
    """
    # Ray takes SIGTERM for itself when it starts, so the signals are taken again after it.
    with (
        _stop_signals() as early_stop,
        reserved_port(config.server),
        local_cluster(config),
        _stop_signals() as stop,
    ):
        if early_stop.is_set():
            stop.set()
        from serving.runtime.application import RunningApplication  # noqa: PLC0415  Imports Ray.

        started_s = time.monotonic()
        say("Starting Ray Serve and loading the tiers …")
        application = RunningApplication(config)
        client = LocalClient(config.server)
        problems = _wait_until_ready(application, client, stop)
        if not stop.is_set():
            say(f"{'Partly ready' if problems else 'Ready'} after {time.monotonic() - started_s:.1f} s.")
            summarise(config, client, say)
            for tier, problem in problems.items():
                say(f"NOT READY: {tier}: {problem}")
            stop.wait()
            say("Draining …")
            application.drain(config.server.drain_timeout_s)
    say("Stopped.")


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set. A second signal interrupts whatever runs."""
    stop = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt(signal.Signals(number).name)
        stop.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_until_ready(
    application: RunningApplication, client: LocalClient, stop: threading.Event
) -> dict[str, str]:
    """Wait until every tier has loaded or failed. Returns why tiers do not answer."""
    give_up_s = time.monotonic() + READY_TIMEOUT_S
    problems: dict[str, str] = {}
    while not stop.wait(_POLL_INTERVAL_S):
        application.check()
        try:
            problems = client.problems()
        except OSError:
            continue  # No gateway listens yet.
        if LOADING not in problems.values() or time.monotonic() > give_up_s:
            break
    return problems
