"""Starting and stopping: what a person sees, what a failure says, and that nothing is left behind."""

from __future__ import annotations

import hashlib
import signal
import threading
from pathlib import Path

import client
import numpy as np
import pytest
import torch
from load import wait_until
from mypackage.module import Classifier
from safetensors.torch import save_file
from server_process import Start, alive, descendants

SLOW_CONFIG = """
server: {drain_timeout_s: 20}
models:
  - name: slow
    source: mypackage.slow:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {max_queue_rows: 2, batching: {max_rows: 1}}}
"""
SLOW = "/v2/models/slow/infer"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_leaves_nothing(start: Start, number: signal.Signals) -> None:
    """A request in flight is answered; then no process, no port and no socket file is left."""
    server = start(SLOW_CONFIG)
    server.wait_for_output("Try:")
    processes = descendants(server.process.pid)
    assert len(processes) > 3
    assert server.leftovers() != []
    replies: list[client.Reply] = []
    body = client.infer_body("x", np.full((1, 2), 1.5))
    asking = threading.Thread(target=lambda: replies.append(server.call("POST", SLOW, body)))
    asking.start()
    server.wait_for_metric("halftone_inflight_rows", 1.0)
    assert server.interrupt(number) == 0, server.output
    asking.join()
    assert replies[0].status == 200
    assert np.array_equal(replies[0].array("y"), np.full((1, 2), 1.5))
    assert "Draining" in server.output
    assert server.output.rstrip().endswith("Stopped.")
    assert {pid for pid in processes if alive(pid)} == set()
    assert server.leftovers() == []
    with pytest.raises(ConnectionRefusedError):
        server.call("GET", "/v2")


def test_ctrl_c_while_starting_leaves_nothing(start: Start) -> None:
    """Interrupted before it is ready, the server stops at once and cleans up."""
    server = start(SLOW_CONFIG)
    server.wait_for_output("Starting Ray Serve")
    processes = descendants(server.process.pid)
    assert server.interrupt() == 0, server.output
    assert server.output.rstrip().endswith("Stopped.")
    assert {pid for pid in processes if alive(pid)} == set()
    assert server.leftovers() == []


def test_a_second_start_on_a_taken_port_says_so(start: Start) -> None:
    """In one line, with exit status 1, and the first server keeps answering."""
    first = start(SLOW_CONFIG)
    first.wait_for_output("Try:")
    second = start(SLOW_CONFIG, first.port)
    assert second.process.wait(30) == 1
    assert second.output.strip() == (
        f"halftone: cannot listen on 127.0.0.1:{first.port}: Address already in use"
    )
    # A burst beyond the queue: refused at once, with the time to come back, and counted.
    body = client.infer_body("x", np.ones((1, 2)))
    replies: list[client.Reply] = []
    threads = [
        threading.Thread(target=lambda: replies.append(first.call("POST", SLOW, body))) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [reply for reply in replies if reply.status == 503]
    assert {reply.status for reply in replies} == {200, 503}
    assert all(reply.json()["code"] == "overloaded" for reply in refused)
    assert all(1 <= int(reply.headers["retry-after"]) <= 60 for reply in refused)
    assert first.interrupt() == 0


WEIGHTS_CONFIG = """
models:
  - name: classifier
    source: mypackage.module:build
    weights: {weights}
    sha256: "{sha256}"
    inputs: [{{name: x, dtype: FP32, shape: [-1, 128]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 10]}}]
    tiers: {{fp32: {{}}}}
  - name: echo
    source: serving.models.echo:Echo
    tiers: {{fp32: {{}}}}
"""


def test_wrong_weights_leave_the_server_up_and_not_ready(start: Start, tmp_path: Path) -> None:
    """A hash that does not match: live, not ready with the reason, 503 for that model only."""
    save_file({"w": torch.ones(1)}, tmp_path / "weights.safetensors")
    config = WEIGHTS_CONFIG.format(weights=tmp_path / "weights.safetensors", sha256="0" * 64)
    server = start(config)
    server.wait_for_output("Try:")
    assert "NOT READY: classifier/fp32" in server.output
    assert server.call("GET", "/v2/health/live").status == 200
    ready = server.call("GET", "/v2/health/ready")
    assert ready.status == 503
    assert "not the configured one" in ready.json()["error"]
    body = client.infer_body("x", np.ones((1, 128)))
    assert server.call("POST", "/v2/models/classifier/infer", body).json()["code"] == "not_ready"
    assert server.call("POST", "/v2/models/echo/infer", body).status == 200
    assert server.interrupt() == 0


def test_right_weights_are_used(start: Start, tmp_path: Path) -> None:
    """The file's weights answer, not the callable's."""
    module = Classifier()
    path = tmp_path / "weights.safetensors"
    save_file(module.state_dict(), path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    server = start(WEIGHTS_CONFIG.format(weights=path, sha256=sha256))
    server.wait_for_output("Try:")
    x = np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32)
    found = server.call("POST", "/v2/models/classifier/infer", client.infer_body("x", x)).array("y")
    with torch.inference_mode():
        expected = module.eval()(torch.from_numpy(x)).numpy()
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert server.interrupt() == 0


def test_missing_resources_are_refused_at_start(start: Start) -> None:
    """A card that is not there: one line, instead of waiting for ever."""
    server = start(SLOW_CONFIG.replace("fp32: {", "fp32: {resources: {NPU: 1}, "))
    assert server.process.wait(60) == 2
    assert "the tiers ask for NPU: 1 in all, and this machine has 0" in server.output


def test_tokens_are_asked_for(start: Start, tmp_path: Path) -> None:
    """With a tokens file, everything but health needs one of its tokens; a changed file counts at once."""
    tokens = tmp_path / "tokens"
    tokens.write_text("# name token\nalice 0123456789abcdef0123\nbob zyxwvutsrqponmlkjihg\n")
    server = start(f"server: {{tokens_file: {tokens}, log: json}}" + SLOW_CONFIG.partition("}")[2])
    server.wait_for_output("Try:")
    assert "0123456789abcdef0123" not in server.output
    assert server.call("GET", "/v2/health/ready").status == 200
    refused = server.call("GET", "/metrics")
    assert (refused.status, refused.json()["code"]) == (401, "unauthorized")
    assert server.call("GET", "/metrics", authorization="Bearer 0123456789abcdef012").status == 401
    bob, carol = "Bearer zyxwvutsrqponmlkjihg", "Bearer carol-has-a-new-token"
    assert server.call("GET", "/metrics", authorization=bob).status == 200
    body = client.infer_body("x", np.ones((1, 2)))
    assert server.call("POST", SLOW, body, authorization=bob).status == 200
    server.wait_for_output('"caller": "bob"')
    tokens.write_text("carol carol-has-a-new-token\n")
    wait_until(lambda: server.call("GET", "/metrics", authorization=carol).status == 200, 10)
    assert server.call("GET", "/metrics", authorization=bob).status == 401
    tokens.write_text("carol\n")
    server.wait_for_output("line 1: a line is `name token`")
    assert server.call("GET", "/metrics", authorization=carol).status == 200
    assert "zyxwvutsrqponmlkjihg" not in server.output
    assert "carol-has-a-new-token" not in server.output
    assert server.interrupt() == 0


FAILING_CONFIG = """
models:
  - name: unbuildable
    source: mypackage.faulty:raises
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {}}
  - name: leaver
    source: mypackage.faulty:exits
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {}}
  - name: forgetful
    source: mypackage.faulty:returns_none
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {}}
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp32: {}}
"""


def test_every_failure_to_start_says_why(start: Start) -> None:
    """At `/v2/health/ready` and in the output; the model that did start answers."""
    server = start(FAILING_CONFIG)
    server.wait_for_output("Try:")
    ready = server.call("GET", "/v2/health/ready")
    assert ready.status == 503
    problems = {
        "unbuildable": "no such layer",
        "leaver": "SystemExit: enough",
        "forgetful": "NoneType",
    }
    for model, reason in problems.items():
        assert f"NOT READY: {model}/fp32" in server.output
        assert f"{model}/fp32: " in ready.json()["error"]
        assert reason in ready.json()["error"], ready.json()["error"]
        body = client.infer_body("x", np.ones((1, 2)))
        assert server.call("POST", f"/v2/models/{model}/infer", body).json()["code"] == "not_ready"
    assert (
        server.call("POST", "/v2/models/echo/infer", client.infer_body("x", np.ones((1, 128)))).status == 200
    )
    assert server.interrupt() == 0
