"""Deployed anew under a scraper's eyes: gateways, replicas and hub are replaced, and no total falls."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import client
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_process import wait_for
from server_process import free_port

CONFIG = """
server: {{port: {port}, gateways: 2, drain_timeout_s: 5}}
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {{fp32: {{max_queue_rows: {rows}}}, fp16: {{max_queue_rows: {rows}}}}}
    divergence: {{sample: 1.0}}
"""
Totals = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Child:
    """The server, told on its standard input to go on."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        paths = []
        for rows in (512, 1024):
            paths.append(folder / f"{rows}.yaml")
            paths[-1].write_text(CONFIG.format(port=self.port, rows=rows), encoding="utf-8")
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("redeploy_child.py")), *map(str, paths)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )

    def go_on(self) -> None:
        """The next deployment, or the end."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def call(self, method: str, path: str, body: bytes = b"") -> client.Reply | None:
        """One request; None where its connection ended with the gateway that had it."""
        try:
            return client.call(("127.0.0.1", self.port), method, path, body)
        except OSError:
            return None

    def is_ready(self) -> bool:
        """Whether every tier answers."""
        assert self.process.poll() is None, self.log.read_text()
        reply = self.call("GET", "/v2/health/ready")
        return reply is not None and reply.status == 200


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Child]:
    """The first configuration, ready."""
    child = Child(tmp_path)
    try:
        wait_for(child.is_ready, "the first deployment", 180)
        yield child
    finally:
        child.process.terminate()
        child.process.communicate(timeout=60)


def cumulative(server: Child) -> Totals | None:
    """Every total of a page; None where there is no page at this moment."""
    reply = server.call("GET", "/metrics")
    if reply is None or reply.status != 200:
        return None
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        if family.type in {"counter", "histogram"}
        for sample in family.samples
    }


def test_no_total_falls(server: Child) -> None:
    """However often the page is looked at, while requests go on."""
    body = client.infer_body("x", np.ones((2, 128)))
    stop, answered = threading.Event(), 0

    def ask() -> None:
        nonlocal answered
        while not stop.wait(0.05):
            reply = server.call("POST", "/v2/models/echo/infer", body)
            answered += reply is not None and reply.status == 200

    asking = threading.Thread(target=ask)
    asking.start()
    pages: list[Totals] = []

    def look() -> None:
        found = cumulative(server)
        if found is not None:
            if pages:
                fallen = {
                    key: (value, found.get(key))
                    for key, value in pages[-1].items()
                    if found.get(key, -1) < value
                }
                assert fallen == {}
            pages.append(found)

    def redeployed() -> bool:
        look()
        page = server.call("GET", "/v2/models/echo/config")
        return server.log.read_text().count("deployed") == 2 and page is not None and len(pages) > 20

    try:
        wait_for(lambda: (look(), answered > 50)[1], "traffic")
        gateways = gateway_processes(server)
        server.go_on()
        wait_for(redeployed, "pages", 180)
        wait_for(lambda: (look(), not gateways & gateway_processes(server))[1], "new gateways", 180)
        wait_for(lambda: (look(), server.is_ready())[1], "ready", 180)
        for _ in range(20):
            look()
    finally:
        stop.set()
        asking.join()
    key = ("halftone_requests_total", frozenset({"model": "echo", "tier": "fp32", "code": "200"}.items()))
    wait_for(lambda: (look(), pages[-1][key] >= answered)[1], "every answered request on the page")
    restarts = [value for (name, _), value in pages[-1].items() if name == "halftone_replica_restarts_total"]
    assert restarts == [0, 0]  # An update is no crash.


def gateway_processes(server: Child) -> set[int]:
    """The gateways' process ids."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, *_ in rows}
    below = {server.process.pid}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {
        int(row[0]) for row in rows if int(row[0]) in below and len(row) > 2 and "halftone:gateway" in row[2]
    }
