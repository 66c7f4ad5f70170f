"""`halftone serve`: start everything, say what stands, obey signals, drain, leave nothing.

SIGINT and SIGTERM drain and stop. SIGHUP reads the configuration again: a second application
starts beside the first; once all its tiers answer, its gateways take the port over, and the first
one is removed. A configuration that is wrong, or whose tiers do not load, changes nothing.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from serving.config import Config
from serving.errors import ConfigError, HalftoneError
from serving.gateway.model import LOADING
from serving.runtime.cluster import check_free_resources, local_cluster, reserved_port
from serving.runtime.local_client import LocalClient
from serving.runtime.summary import summarise

if TYPE_CHECKING:
    from serving.runtime.application import RunningApplication

#: For every tier to load. Large models on slow disks take minutes.
READY_TIMEOUT_S = 1800.0
_POLL_INTERVAL_S = 0.2

Printer = Callable[[str], None]


def serve(config: Config, say: Printer, read_again: Callable[[], Config]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: checked.
        say: prints a line.
        read_again: the configuration as it is in its file now; raises `ConfigError`.

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
        _reload_signal(stop) as reload,
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
            while not stop.wait(_POLL_INTERVAL_S):
                if reload.is_set():
                    reload.clear()
                    config, application = _reloaded(config, application, read_again, stop, say)
            say("Draining …")
            application.drain(config.server.drain_timeout_s)
    say("Stopped.")


def _reloaded(
    config: Config,
    application: RunningApplication,
    read_again: Callable[[], Config],
    stop: threading.Event,
    say: Printer,
) -> tuple[Config, RunningApplication]:
    """The new configuration and its application, in service; or those that are."""
    from serving.runtime.application import RunningApplication  # noqa: PLC0415  Imports Ray.

    successor = None
    try:
        new = read_again()
        _check_change(config, new)
        say("Loading the changed configuration beside the one that serves …")
        successor = RunningApplication(new, application)
        successor.wait_until_it_serves(stop.is_set)
    except HalftoneError as error:
        say(f"NOT RELOADED, and the server goes on as it was: {error}")
        if successor is not None:
            successor.remove()
        return config, application
    application.retire(config.server.drain_timeout_s)
    say("Reloaded.")
    return new, successor


def _check_change(old: Config, new: Config) -> None:
    """Refuse what cannot change while the server runs.

    Raises:
        ConfigError: the address, TLS or none, or more resources than are free beside what serves.
    """
    for field in ("host", "port"):
        if getattr(old.server, field) != getattr(new.server, field):
            raise ConfigError("cannot change while the server runs", f"server.{field}")
    if (old.server.tls_certificate is None) != (new.server.tls_certificate is None):
        # Old and new gateways share the port for a moment: half of the connections would fail.
        raise ConfigError("TLS cannot be switched while the server runs", "server.tls_certificate")
    check_free_resources(new)


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


@contextmanager
def _reload_signal(stop: threading.Event) -> Iterator[threading.Event]:
    """An event that SIGHUP sets. On a terminal it means that this has gone, and stops the server."""
    reload = threading.Event()
    asked = stop if sys.stdout.isatty() else reload
    previous = signal.signal(signal.SIGHUP, lambda *_: asked.set())
    try:
        yield reload
    finally:
        signal.signal(signal.SIGHUP, previous)


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
