"""NPU graphs of the real torch_npu, on a simulated card (stub CANN): captured, replayed, broken, served.

The stand-in records operators and copies and makes the calls again; waiting for a stream that is captured
is refused, as CANN documents it. How fast a replay is, or what a real card captures, is not seen here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import client
import graphs_child
import networks
import numpy as np
import pytest
import server_process
from card import HERE, IEEE, SATURATING, SimulatedCard
from contract_child import distance, on_cpu, vision_rows

TIMEOUT_S = 120
#: For the check that lets it run out.
MEMORY_MB = 512

Results = dict[str, str | None]

each_mode = pytest.mark.parametrize("task_queue", [True, False], ids=["queued", "blocking"])

CONFIG = """
models:
  - name: vision
    source: networks:vision
    device: npu
    inputs: [{name: x, dtype: FP32, shape: [-1, 3, 16, 16]}]
    outputs: [{name: logits, dtype: FP32, shape: [-1, 10], kind: logits}]
    tiers:
      fp16: {resources: {NPU: 1}, graphs: true, batching: {max_rows: 8, buckets: [1, 4, 8]}}
"""


@pytest.fixture(scope="session")
def results(card: SimulatedCard, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """The results of a process, run when first asked for."""
    done: dict[tuple[str, bool], Results] = {}

    def run(checks: str, task_queue: bool) -> Results:
        key = (checks, task_queue)
        if key not in done:
            done[key] = _run(card, checks, task_queue, tmp_path_factory.mktemp("graphs"))
        return done[key]

    return run


def _run(card: SimulatedCard, checks: str, task_queue: bool, folder: Path) -> Results:
    soc = SATURATING if "old_card" in checks else IEEE
    written = folder / "results.json"
    child = subprocess.run(
        [sys.executable, str(HERE / "graphs_child.py"), str(written), checks],
        env=card.environment(soc, memory_mb=MEMORY_MB, task_queue=task_queue),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    found: Results = json.loads(written.read_text("utf-8")) if written.exists() else {}
    if child.returncode != 0:
        found["end"] = f"exit status {child.returncode}: {child.stderr[-8000:]}"
    return found


@each_mode
@pytest.mark.parametrize("name", [*graphs_child.CHECKS, *graphs_child.ALONE])
def test_graphs(results: Callable[..., Results], name: str, *, task_queue: bool) -> None:
    """One check of `graphs_child.py`, whose docstring says what holds."""
    found = results("graphs" if name in graphs_child.CHECKS else name, task_queue)
    assert name in found, f"not reached; {found.get('end')}"
    assert found[name] is None, found[name]


def test_a_served_tier_replays(card: SimulatedCard, tmp_path: Path) -> None:
    """Through HTTP: the model's page says that graphs are on; requests of any size get their own rows."""
    environment = card.environment(IEEE)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment["PYTHONPATH"]])
    with server_process.ready_server(tmp_path, CONFIG, environment) as server:
        switches = server.call("GET", "/v2/models/vision").json()["tiers"]["fp16"]["switches"]
        assert (switches["graphs"], switches["buckets"]) == ("on", "1, 4, 8")
        for rows in (1, 3, 8, 2):
            x = vision_rows(rows) * np.float32(rows)
            reply = server.call("POST", "/v2/models/vision/infer", client.infer_body("x", x))
            assert (reply.status, reply.headers["x-precision-effective"]) == (200, "fp16"), reply.body
            assert 1e-6 < distance(reply.array("logits"), on_cpu(networks.vision(), x)) < 5e-3
