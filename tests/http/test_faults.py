"""Processes that are killed under load: what is lost, what heals, and what callers are told."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

from load import BODY, Load, ready, wait_until
from server_process import ServerProcess, Start
from wellness import assert_still_well

CONFIG = """
server: {gateways: 2}
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp16: {replicas: 2}}
  - name: lazy
    source: mypackage.lazy:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 128]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 128]}]
    tiers: {fp32: {}}
"""
THREE = """
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp32: {replicas: 3, batching: {max_rows: 1}}}
"""


def test_killed_processes_cost_only_what_they_held(start: Start) -> None:
    """One of two replicas, the only replica, Serve's controller, the hub, a gateway, in turn."""
    server = start(CONFIG)
    server.wait_for_output("Try:")
    _one_of_two_replicas(server)
    _the_only_replica(server)
    _the_controller(server)
    _the_hub(server)
    _a_gateway(server)
    assert_still_well(server, "/v2/models/echo/infer", BODY)
    assert server.interrupt() == 0, server.output


def _one_of_two_replicas(server: ServerProcess) -> None:
    """No request is lost: its batches run on the other."""
    wait_until(lambda: len(server.replicas("halftone:echo:fp16")) == 2)
    with Load(server) as load:
        time.sleep(1)
        os.kill(server.replicas("halftone:echo:fp16")[0], signal.SIGKILL)
        time.sleep(3)
    assert Counter(load.replies).keys() == {(200, "")}
    wait_until(lambda: len(server.replicas("halftone:echo:fp16")) == 2)


def _the_only_replica(server: ServerProcess) -> None:
    """Not ready meanwhile, refused with 503, and healed without help. It takes 10 s to load."""
    [replica] = server.replicas("halftone:lazy:fp32")
    with Load(server, "lazy") as load:
        time.sleep(0.5)
        os.kill(replica, signal.SIGKILL)
        wait_until(lambda: not ready(server))
        wait_until(lambda: ready(server))
        time.sleep(1.5)
    assert {status for status, _ in load.replies} <= {200, 503}
    assert load.replies[-1] == (200, "")


def _the_controller(server: ServerProcess) -> None:
    """Serve's control plane restarts while requests go on as if nothing had happened."""
    [controller] = server.processes("ray::ServeController")
    with Load(server) as load:
        time.sleep(0.5)
        os.kill(controller, signal.SIGKILL)
        wait_until(lambda: server.processes("ray::ServeController") not in ([], [controller]))
        time.sleep(6)  # It looks for its replicas meanwhile, and must find them well.
    assert Counter(load.replies).keys() == {(200, "")}


def _the_hub(server: ServerProcess) -> None:
    """`/metrics` says that it has none for a while; inference does not notice."""
    [hub] = server.processes("halftone:hub")
    with Load(server) as load:
        os.kill(hub, signal.SIGKILL)
        statuses = set()

        def counted() -> bool:
            reply = server.call("GET", "/metrics")
            statuses.add(reply.status)
            return reply.status == 200

        time.sleep(0.5)
        wait_until(counted)
    assert statuses <= {200, 503}
    assert Counter(load.replies).keys() == {(200, "")}


def _a_gateway(server: ServerProcess) -> None:
    """Its own connections break; the other one answers, and a new one shares the port again."""
    gateways = server.processes("halftone:gateway")
    assert len(gateways) == 2
    with Load(server) as load:
        time.sleep(0.5)
        os.kill(gateways[0], signal.SIGKILL)
        wait_until(lambda: len(server.processes("halftone:gateway")) == 2)
        time.sleep(3)
    broken = Counter(load.replies)
    assert {status for status, _ in broken} <= {0, 200}
    assert sum(count for (status, _), count in broken.items() if status == 0) <= 8
    assert load.replies[-1] == (200, "")


def test_the_last_of_three_replicas_takes_the_batches_of_all(start: Start) -> None:
    """As many as gateways may have under way for three, each of one row here."""
    server = start(THREE)
    server.wait_for_output("Try:")
    title = "halftone:echo:fp32"
    wait_until(lambda: len(server.replicas(title)) == 3)
    with Load(server, clients=16) as load:
        load.wait_for_replies(200)
        for victim in server.replicas(title)[:2]:
            # One after the other: a row that loses two replicas is taken for what ends them.
            os.kill(victim, signal.SIGKILL)
            load.wait_for_replies(200)
        load.wait_for_replies(1000)
        wait_until(lambda: len(server.replicas(title)) == 3)
    assert Counter(load.replies).keys() == {(200, "")}
    assert server.interrupt() == 0, server.output
