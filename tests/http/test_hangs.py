"""Replicas that stop answering without ending: found, replaced, and their batches computed elsewhere."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator

import client
import numpy as np
import pytest
from load import Load, ready, wait_until
from mypackage import faulty
from server_process import ServerProcess, alive, ready_server
from wellness import assert_still_well

CONFIG = """
server: {request_timeout_s: 16}
models:
  - name: faulty
    source: mypackage.faulty:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {replicas: 2, batching: {max_rows: 4}}}
"""
PATH = "/v2/models/faulty/infer"
TITLE = "halftone:faulty:fp32"
GOOD = client.infer_body("x", np.ones((1, 2)))


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose replicas are made to hang. A batch of more than 8 s is taken for one that never ends."""
    with ready_server(tmp_path_factory.mktemp("hanging"), CONFIG) as process:
        # The tier is ready with one of them.
        wait_until(lambda: len(process.replicas(TITLE)) == 2)
        yield process


def healed(server: ServerProcess, gone: int) -> bool:
    """Two replicas, and not the one that hung."""
    now = server.replicas(TITLE)
    return len(now) == 2 and gone not in now and ready(server)


@pytest.mark.parametrize("first", [faulty.HANGS, faulty.HANGS_HARD], ids=["device thread", "whole process"])
def test_a_hung_replica_is_replaced_and_its_batch_is_computed_elsewhere(
    hanging: ServerProcess, first: float
) -> None:
    """No request is lost, that of the hung batch included; the others hardly notice."""
    before = hanging.replicas(TITLE)
    assert len(before) == 2
    (hanging.temporary / faulty.HANG_ONCE.name).touch()
    with Load(hanging, "faulty", body=GOOD) as load:
        load.wait_for_replies(20)
        began_s = time.monotonic()
        reply = hanging.call("POST", PATH, client.infer_body("x", np.array([[first, 5.0]])))
        took_s = time.monotonic() - began_s
        load.wait_for_replies(20)
        wait_until(lambda: not all(map(alive, before)))
        [gone] = [pid for pid in before if not alive(pid)]
        healed_s = wait_until(lambda: healed(hanging, gone))
    print(f"answered after {took_s:.1f} s, two replicas again {healed_s:.1f} s after that")
    assert reply.status == 200, reply.body
    assert np.array_equal(reply.array("y"), [[first, 5.0]])
    assert Counter(load.replies).keys() == {(200, "")}
    assert took_s < 16
    assert_still_well(hanging, PATH, GOOD)


def test_a_stopped_process_is_replaced(hanging: ServerProcess) -> None:
    """SIGSTOP: it answers nothing, and its sockets stand. No request is lost."""
    victim = hanging.replicas(TITLE)[0]
    with Load(hanging, "faulty", body=GOOD) as load:
        load.wait_for_replies(20)
        os.kill(victim, signal.SIGSTOP)
        began_s = time.monotonic()
        load.wait_for_replies(20)
        wait_until(lambda: healed(hanging, victim))
        healed_s = time.monotonic() - began_s
    print(
        f"two replicas again {healed_s:.1f} s after the stop; the slowest reply took {max(load.took_s):.1f} s"
    )
    assert Counter(load.replies).keys() == {(200, "")}
