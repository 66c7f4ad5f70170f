"""The table of what goes wrong and what is answered: every row of it is tested on a running server.

`ROWS` is that table, with the tests of each row. Each of those tests, or a step of it, ends in a good
request and a page of metrics that parses.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import client
import numpy as np
import pytest
from load import BODY, Load, wait_until
from mypackage.module import Classifier
from prometheus_page import Page
from safetensors.torch import save_file
from server_process import ServerProcess
from wellness import assert_still_well

from loadtests.slow_clients import KINDS, SlowClients, open_peers

TESTS = Path(__file__).parents[1]
BAD_INPUT = "http/test_bad_input.py::test_bad_requests_are_refused_clearly"
HERE = "http/test_error_table.py::"
ROWS: dict[str, list[str]] = {
    "bad, empty, non-UTF-8 JSON, too deep": [BAD_INPUT],
    "non-finite in JSON and in binary": [BAD_INPUT],
    "lone surrogate in any string": [BAD_INPUT],
    "bool or string for a number, wrong dtype": [BAD_INPUT],
    "shape against data, negative, too large, rank": [BAD_INPUT],
    "missing, duplicate, unknown tensor": [BAD_INPUT],
    "body over the limit": [
        BAD_INPUT,
        "http/test_bad_input.py::test_a_chunked_body_over_the_limit_is_cut_off",
        "http/test_bad_input.py::test_a_body_in_one_byte_chunks_is_cut_off",
    ],
    "content type, encoding, compression bomb": [BAD_INPUT],
    "absurd Inference-Header-Content-Length": [BAD_INPUT],
    "unknown, empty, repeated X-Precision": [
        BAD_INPUT,
        "http/test_bad_input.py::test_a_repeated_precision_is_refused",
    ],
    "a tier that the card cannot honour": [
        "http/test_rehearsal.py::test_fp32_on_a_card_without_it_is_refused"
    ],
    "unknown model, ../, route, method": ["http/test_bad_input.py::test_wrong_names_routes_and_methods"],
    "overflow in a row": [
        "http/test_overflow.py::test_one_overflowing_row_is_fp32_s",
        "http/test_overflow.py::test_what_fp32_cannot_hold_refuses_its_own_request",
    ],
    "queue full": ["http/test_overload.py::test_ten_times_overload"],
    "deadline": ["http/test_bad_input.py::test_a_deadline_ends_a_waiting_request"],
    "client gone": [f"{HERE}test_a_client_that_goes_away_is_counted_and_costs_no_compute"],
    "device out of memory": ["simulated_card/test_served.py::test_memory_that_runs_out_is_503_and_passes"],
    "device hung or lost": [
        "http/test_hangs.py::test_a_hung_replica_is_replaced_and_its_batch_is_computed_elsewhere"
    ],
    "replica killed": ["http/test_faults.py::test_killed_processes_cost_only_what_they_held"],
    "still loading": [f"{HERE}test_while_a_tier_loads_the_others_answer"],
    "weights corrupt, of another hash, pickled": [f"{HERE}test_weights_that_are_none_are_refused"],
    "SIGTERM, redeploy under load": ["http/test_reload.py::test_a_change_under_load_fails_no_request"],
    "slow header, body, reader": [
        f"{HERE}test_slow_clients_are_closed_and_cost_others_nothing",
        "http/test_bad_input.py::test_a_body_that_stays_away_ends_at_its_timeout",
    ],
    "ten thousand hostile names": ["http/test_bad_input.py::test_hostile_names_make_no_series"],
}
#: What ends a test of the table; the others are steps of their modules that end in the first.
ENDINGS = {"assert_still_well", "still_well", "good_request_follows"}

CONFIG = """
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {{fp32: {{}}, fp16: {{}}}}
  - name: lazy
    source: mypackage.lazy:build
    inputs: [{{name: x, dtype: FP32, shape: [-1, 128]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 128]}}]
    tiers: {{fp32: {{}}}}
  - name: slow
    source: mypackage.slow:build
    inputs: [{{name: x, dtype: FP32, shape: [-1, 2]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 2]}}]
    tiers: {{fp32: {{batching: {{max_rows: 1}}}}}}
"""
WEIGHTS = """
  - name: {name}
    source: mypackage.module:build
    weights: {file}
    sha256: "{sha256}"
    inputs: [{{name: x, dtype: FP32, shape: [-1, 128]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 10]}}]
    tiers: {{fp32: {{}}}}
"""
ECHO, LAZY, SLOW = (f"/v2/models/{name}/infer" for name in ("echo", "lazy", "slow"))
SLOW_BODY = client.infer_body("x", np.ones((1, 2)))
#: Ten seconds, and what the clients' own clocks are coarse by.
MAX_HELD_S = 13.0


class Harmful:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.trace,)


def bad_weights(folder: Path) -> str:
    """Three models whose weights are none."""
    good = folder / "good.safetensors"
    save_file(Classifier().state_dict(), good)
    content = {
        "truncated": good.read_bytes()[:-1000],
        "pickled": pickle.dumps(Harmful(folder / "unpickled")),
        "changed": good.read_bytes(),
    }
    models = ""
    for name, data in content.items():
        file = folder / f"{name}.safetensors"
        file.write_bytes(data)
        found = hashlib.sha256(b"other" if name == "changed" else data).hexdigest()
        models += WEIGHTS.format(name=name, file=file, sha256=found)
    return models


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server from the moment it is started."""
    folder = tmp_path_factory.mktemp("table")
    process = ServerProcess(folder, CONFIG.format() + bad_weights(folder))
    yield process
    try:
        assert process.interrupt() == 0, process.output
    finally:
        process.kill()


@pytest.fixture
def table(starting: ServerProcess) -> ServerProcess:
    """The server once all its tiers have loaded or failed."""
    starting.wait_for_output("Try:")
    return starting


def page(server: ServerProcess) -> Page:
    """The metrics, now."""
    return Page.parse(server.call("GET", "/metrics").body.decode())


def answers(server: ServerProcess, path: str, body: bytes = b"") -> int | None:
    """The status, or None where nothing listens yet."""
    try:
        return server.call("POST" if body else "GET", path, body).status
    except OSError:
        return None


def test_while_a_tier_loads_the_others_answer(starting: ServerProcess) -> None:
    """Live, not ready, and 503 for that model alone."""
    wait_until(lambda: answers(starting, ECHO, BODY) == 200)
    assert starting.call("GET", "/v2/health/live").status == 200
    ready = starting.call("GET", "/v2/health/ready")
    assert ready.status == 503
    assert "lazy/fp32: loading" in ready.json()["error"]
    refused = starting.call("POST", LAZY, BODY)
    assert (refused.status, refused.json()["code"]) == (503, "not_ready")
    assert_still_well(starting, ECHO, BODY)
    wait_until(lambda: answers(starting, LAZY, BODY) == 200)


@pytest.mark.parametrize(
    ("model", "reason"),
    [("truncated", "safetensors"), ("pickled", "safetensors"), ("changed", "not the configured one")],
)
def test_weights_that_are_none_are_refused(table: ServerProcess, model: str, reason: str) -> None:
    """Not ready, with the reason; the model answers 503, and nothing was unpickled."""
    ready = table.call("GET", f"/v2/models/{model}/ready")
    assert ready.status == 503
    assert reason in ready.json()["error"]
    body = client.infer_body("x", np.ones((1, 128)))
    assert table.call("POST", f"/v2/models/{model}/infer", body).json()["code"] == "not_ready"
    assert not (table.config.parent / "unpickled").exists()
    assert_still_well(table, ECHO, BODY)


def test_a_client_that_goes_away_is_counted_and_costs_no_compute(table: ServerProcess) -> None:
    """499, while it waits behind four others of a second each: its row is never computed."""
    before = page(table)
    replies: list[int] = []
    others = [
        threading.Thread(target=lambda: replies.append(table.call("POST", SLOW, SLOW_BODY).status))
        for _ in range(4)
    ]
    for thread in others:
        thread.start()
    wait_until(lambda: page(table).since(before).total("halftone_inflight_rows", model="slow") == 1)
    with socket.create_connection(table.address) as leaving:
        head = f"POST {SLOW} HTTP/1.1\r\nhost: t\r\ncontent-length: {len(SLOW_BODY)}\r\n\r\n"
        leaving.sendall(head.encode() + SLOW_BODY)
        time.sleep(0.2)  # It arrives, and waits.
    for thread in others:
        thread.join()
    assert replies == [200] * 4
    table.wait_for_metric("halftone_queue_rows", 0.0)
    wait_until(
        lambda: page(table).since(before).total("halftone_requests_total", model="slow", code="499") == 1, 10
    )
    assert page(table).since(before).total("halftone_rows_total", model="slow") == 4
    assert_still_well(table, SLOW, SLOW_BODY)


def test_slow_clients_are_closed_and_cost_others_nothing(table: ServerProcess) -> None:
    """Twenty of each kind, at a byte a second, for longer than any of them is suffered."""
    slow = [SlowClients(table.port, kind, 20) for kind in KINDS]

    async def dawdle() -> None:
        await asyncio.gather(*(clients.run(MAX_HELD_S + 4) for clients in slow))

    with Load(table) as load:
        asyncio.run(dawdle())
    assert Counter(load.replies).keys() == {(200, "")}
    for clients in slow:
        # All have been turned out once, and none was kept for the whole time.
        assert len(clients.held_s) >= 40
        assert max(clients.held_s) < MAX_HELD_S
    wait_until(lambda: len(open_peers(table.port)) == 0, MAX_HELD_S)
    assert_still_well(table, ECHO, BODY)


def functions(file: str) -> dict[str, ast.FunctionDef]:
    """A test module's own, by name."""
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def called(function: ast.FunctionDef) -> set[str]:
    """The plain names that it calls."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.id for call in calls if isinstance(call, ast.Name)}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_tests_that_end_well(row: str) -> None:
    """Each is there, and calls what sends a good request and reads the metrics."""
    assert ROWS[row]
    for place in ROWS[row]:
        file, _, name = place.partition("::")
        found = functions(file)
        assert name in found, f"{place} is not there"
        assert called(found[name]) & ENDINGS, f"{place} does not look whether the server is well"
        for ending in (called(found[name]) & ENDINGS) - {"assert_still_well"}:
            assert "assert_still_well" in called(found[ending]), f"{ending} in {file} does not look"
