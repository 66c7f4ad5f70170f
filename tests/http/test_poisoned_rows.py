"""Rows that make a model do its worst: they fail alone, and are not let near a replica again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import client
import numpy as np
import pytest
from load import ready, wait_until
from mypackage import faulty
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, ready_server

CONFIG = """
server: {request_timeout_s: 100}
models:
  - name: faulty
    source: mypackage.faulty:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {replicas: 2, batching: {max_rows: 8}}}
"""
PATH = "/v2/models/faulty/infer"
TITLE = "halftone:faulty:fp32"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model that some rows kill."""
    with ready_server(tmp_path_factory.mktemp("poisoned"), CONFIG) as process:
        # The tier is ready with one of them.
        wait_until(lambda: len(process.replicas(TITLE)) == 2)
        yield process


def ask(server: ServerProcess, *firsts: float) -> client.Reply:
    """Rows that begin with these numbers."""
    return server.call("POST", PATH, client.infer_body("x", np.array([[first, 1.0] for first in firsts])))


@pytest.mark.parametrize("first", [faulty.RAISES, faulty.EXITS])
def test_a_row_that_raises_fails_its_own_request(poisoned: ServerProcess, first: float) -> None:
    """Batch-mates are answered, and no replica ends."""
    before = poisoned.replicas(TITLE)
    firsts = [first if number % 4 == 0 else 100.0 + number for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda value: ask(poisoned, value), firsts))
    for value, reply in zip(firsts, replies, strict=True):
        if value == first:
            assert (reply.status, reply.json()["code"]) == (500, "model_error")
            assert "thirteen" not in reply.json()["error"]
        else:
            assert reply.status == 200
            assert np.array_equal(reply.array("y"), [[value, 1.0]])
    assert poisoned.replicas(TITLE) == before


def test_a_row_that_kills_its_process_is_found_and_quarantined(poisoned: ServerProcess) -> None:
    """Its batch-mates are answered; sent again, it reaches no replica."""
    began_s = time.monotonic()
    mates = [float(number) for number in range(1, 8)]
    # One request of eight rows is one batch; the others are in flight beside it.
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(ask, poisoned, value) for value in mates]
        deadly = pool.submit(ask, poisoned, *mates[:3], faulty.DEADLY)
        refused, answered = deadly.result(), [each.result() for each in beside]
    print(f"found after {time.monotonic() - began_s:.1f} s")
    assert (refused.status, refused.json()["code"]) == (422, "quarantined"), refused.body
    assert "row 3 ended the process" in refused.json()["error"]
    for value, reply in zip(mates, answered, strict=True):
        assert reply.status == 200, reply.body
        assert np.array_equal(reply.array("y"), [[value, 1.0]])
    wait_until(lambda: len(poisoned.replicas(TITLE)) == 2 and ready(poisoned))
    replicas = poisoned.replicas(TITLE)
    for _ in range(5):
        again = ask(poisoned, 2.0, faulty.DEADLY)
        assert (again.status, again.json()["code"]) == (422, "quarantined")
        assert "row 1 " in again.json()["error"]
        assert ask(poisoned, 2.0).status == 200
    assert poisoned.replicas(TITLE) == replicas
    page = poisoned.call("GET", "/metrics").body.decode()
    assert any(
        sample.labels.get("reason") == "quarantined"
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    )
