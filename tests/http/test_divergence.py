"""Live divergence on running servers: figures as an offline computation has them, and a budget that acts."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import client
import numpy as np
import pytest
from mypackage.drifting import DRIFT_VARIABLE, FEATURES, real_rows
from prometheus_page import Page
from server_process import ServerProcess, Start, ready_server
from tumour_classifier import train, tumours

from serving.cli import main
from serving.divergence.capture import read_capture

CONFIG = """
server: {{gateways: 2}}
models:
  - name: every
    source: mypackage.drifting:Drifting
    tiers: {{fp32: {{}}, fp16: {{max_queue_rows: 4096}}}}
    classes: {{standard: fp16, sensitive: fp32}}
    default: standard
    divergence:
      sample: 1.0
      budget: 1.0e-2
      quantile: 0.9
      window: 200
      min_samples: 50
      cooldown_s: 1
      probe_share: 0.5
      shadow: {{max_rows: 20000}}
      capture: {{folder: captures, rows: 4, max_bytes: 100000}}
  - name: some
    source: mypackage.drifting:Drifting
    tiers: {{fp32: {{}}, fp16: {{max_queue_rows: 4096}}}}
    divergence: {{sample: 0.05}}
  - name: tumours
    source: tumour_classifier:build
    weights: {weights}
    inputs: [{{name: x, dtype: FP32, shape: [-1, 30]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 2], kind: logits}}]
    tiers: {{fp32: {{}}, fp16: {{}}, mixed: {{keep_fp32: [front]}}}}
    default: fp16
    divergence: {{sample: 1.0, min_samples: 100, budget: 0.1}}
"""
TIMEOUT_S = 60.0


class Drift:
    """The file that the FP16 tiers look at."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def set(self, share: float) -> None:
        """From the next batch on."""
        whole = self.file.with_suffix(".new")
        whole.write_text(str(share))
        whole.replace(self.file)


@pytest.fixture(scope="module")
def drift(tmp_path_factory: pytest.TempPathFactory) -> Drift:
    """None yet."""
    return Drift(tmp_path_factory.mktemp("drift") / "share")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, drift: Drift) -> Iterator[ServerProcess]:
    """A server of three models, with two gateways."""
    folder = tmp_path_factory.mktemp("measured")
    train(folder / "weights.safetensors")
    config = CONFIG.format(weights=folder / "weights.safetensors")
    environment = {DRIFT_VARIABLE: str(drift.file)}
    with ready_server(folder, config, environment) as process:
        yield process


def wait_for(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    """Until it comes true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come true"
        time.sleep(0.1)


def page(server: ServerProcess) -> Page:
    """A scrape."""
    return Page.parse(server.call("GET", "/metrics").body.decode())


def settled_page(server: ServerProcess) -> Page:
    """A scrape after which nothing is counted any more: gateways have told theirs, and compared all."""
    before = page(server)
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        time.sleep(1.2)  # Two beats.
        scraped = page(server)
        if scraped.total("halftone_shadow_rows_total") == before.total("halftone_shadow_rows_total"):
            return scraped
        assert time.monotonic() < deadline_s, "rows are compared for ever"
        before = scraped


def infer(server: ServerProcess, model: str, x: np.ndarray, **headers: str) -> client.Reply:
    """One request, which is answered."""
    reply = server.call("POST", f"/v2/models/{model}/infer", client.infer_body("x", x), **headers)
    assert reply.status == 200, reply.body
    return reply


def answers(server: ServerProcess, model: str, x: np.ndarray, tier: str, at_once: int = 500) -> np.ndarray:
    """A tier's answers to many rows."""
    parts = [x[start : start + at_once] for start in range(0, len(x), at_once)]
    return np.concatenate([infer(server, model, part, x_precision=tier).array("y") for part in parts])


def relative_l2(tier: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """[rows]: by the formula."""
    a, b = tier.astype(np.float64), reference.astype(np.float64)
    found: np.ndarray = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 2.0**-14)
    return found


def standing(server: ServerProcess, model: str, tier: str = "fp16") -> dict[str, Any]:
    """What is told of a tier."""
    reply = server.call("GET", f"/v2/models/{model}/precision")
    assert reply.status == 200
    found: dict[str, Any] = reply.json()["tiers"][tier]
    return found


def compared_rows(server: ServerProcess, model: str) -> float:
    """Rows of its FP16 tier that have been compared."""
    return page(server).total("halftone_shadow_rows_total", model=model, tier="fp16", outcome="compared")


def test_a_tolerance_before_anything_is_known(measured: ServerProcess) -> None:
    """The reference answers, and says why."""
    reply = infer(measured, "some", real_rows(1), x_precision="rel_l2<=1e-2")
    assert reply.headers["x-precision-tier"] == "fp32"
    assert reply.headers["x-precision-reason"] == "tolerance"
    assert reply.headers["x-precision-measured"] == "no other tier is known to keep within this tolerance"


def test_mean_and_p99_are_those_of_an_offline_computation(measured: ServerProcess) -> None:
    """To 2 %, over 2,000 rows that are all compared."""
    x = real_rows(2000, seed=1)
    before = settled_page(measured)
    tier = answers(measured, "every", x, "fp16")
    scraped = settled_page(measured).since(before)
    labels = {"model": "every", "tier": "fp16"}
    assert scraped.total("halftone_shadow_rows_total", **labels, outcome="compared") == len(x)
    assert scraped.total("halftone_shadow_rows_total", **labels) == len(x)
    assert scraped.total("halftone_divergence_verdict_total", **labels) == len(x)
    figures = relative_l2(tier, answers(measured, "every", x, "fp32"))
    assert figures.min() > 1e-5, "FP16 rounds"
    labels |= {"output": "y", "metric": "rel_l2"}
    assert scraped.total("halftone_divergence_count", **labels) == len(x)
    assert scraped.mean("halftone_divergence", **labels) == pytest.approx(figures.mean(), rel=0.02)
    p99 = scraped.histogram_quantile(0.99, "halftone_divergence", **labels)
    assert p99 == pytest.approx(np.quantile(figures, 0.99), rel=0.02)


def test_a_sample_gives_the_p99_within_the_binomial_error(measured: ServerProcess) -> None:
    """One row in twenty of 20,000: between the quantiles that three standard errors allow."""
    x = real_rows(20_000, seed=2)
    tier = answers(measured, "some", x, "fp16", at_once=1000)
    figures = relative_l2(tier, answers(measured, "some", x, "fp32", at_once=1000))
    labels = {"model": "some", "tier": "fp16"}
    scraped = settled_page(measured)
    count = scraped.total("halftone_divergence_count", **labels, output="y", metric="rel_l2")
    assert abs(count - 1000) < 4 * math.sqrt(20_000 * 0.05 * 0.95) + 10  # And what was asked before.
    assert scraped.total("halftone_shadow_rows_total", **labels) == count
    error = 3 * math.sqrt(0.99 * 0.01 / count)
    low, high = np.quantile(figures, [0.99 - error, min(1.0, 0.99 + error)])
    p99 = scraped.histogram_quantile(0.99, "halftone_divergence", **labels, output="y", metric="rel_l2")
    assert low / 1.06 <= p99 <= high * 1.06  # A bucket is 6 % wide.


def test_a_tolerance_once_enough_is_known(measured: ServerProcess) -> None:
    """FP16 answers what it is known to keep within, and the reference what it is not."""
    wait_for(lambda: standing(measured, "some")["bounds"].get("rel_l2"))
    bound = standing(measured, "some")["bounds"]["rel_l2"]
    assert bound >= standing(measured, "some")["quantiles"]["rel_l2"]
    x = real_rows(1)
    for tolerated, tier in ((bound * 1.5, "fp16"), (bound / 1.5, "fp32")):
        reply = infer(measured, "some", x, x_precision=f"rel_l2<={tolerated:.3e}")
        assert (reply.headers["x-precision-tier"], reply.headers["x-precision-reason"]) == (tier, "tolerance")
    parameters = {"precision": f"rel_l2<={bound * 1.5:.3e}"}
    body = json.loads(client.infer_body("x", x)) | {"parameters": parameters}
    reply = measured.call("POST", "/v2/models/some/infer", json.dumps(body).encode())
    assert reply.headers["x-precision-tier"] == "fp16"
    assert "samples=" in reply.json()["parameters"]["precision_measured"]
    wait_for(lambda: page(measured).total("halftone_routed_total", model="some", declared="tolerance") >= 3)


def test_verification_on_both_wire_formats(measured: ServerProcess) -> None:
    """Divergence and verdict of this very request, as its two answers have it."""
    x = real_rows(3, seed=9)
    reply = infer(measured, "every", x, x_precision="fp16", x_precision_verify="true")
    wanted = relative_l2(reply.array("y"), infer(measured, "every", x, x_precision="fp32").array("y")).max()
    assert told_divergence(reply)["rel_l2"] == pytest.approx(wanted, rel=1e-2)
    assert set(told_divergence(reply)) == {"rel_l2", "max_abs", "cosine"}
    assert reply.headers["x-precision-verdict"] in {"pass", "warn"}
    assert reply.headers["x-precision-tier"] == "fp16"
    parameters = reply.json()["parameters"]
    assert parameters["precision_divergence"] == reply.headers["x-precision-divergence"]
    assert parameters["precision_verdict"] == reply.headers["x-precision-verdict"]
    body, headers = binary_request(x)
    binary = measured.call("POST", "/v2/models/every/infer", body, **headers, x_precision_verify="true")
    assert binary.status == 200
    assert told_divergence(binary)["rel_l2"] == pytest.approx(wanted, rel=1e-2)
    assert binary.headers["x-precision-verdict"] == reply.headers["x-precision-verdict"]


def told_divergence(reply: client.Reply) -> dict[str, float]:
    """The header, taken apart."""
    parts = [part.split("=") for part in reply.headers["x-precision-divergence"].split(", ")]
    return {metric: float(value) for metric, value in parts}


def binary_request(x: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request for FP16, in the binary format both ways."""
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    head = json.dumps(
        {"inputs": [tensor], "parameters": {"precision": "fp16", "binary_data_output": True}}
    ).encode()
    headers = {"content_type": "application/octet-stream", "inference_header_content_length": str(len(head))}
    return head + x.tobytes(), headers


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x_precision_verify": "maybe"}, "bad_precision"),
        ({"x_precision": "rel_l2<=0"}, "bad_precision"),
        ({"x_precision": "rel_l2<=nan"}, "bad_precision"),
        ({"x_precision": "rel_l2<=1e999"}, "bad_precision"),
        ({"x_precision": "cosine<=1"}, "bad_precision"),
        ({"x_precision": "rel_l2<1"}, "bad_precision"),
        ({"x_precision": "rel_l2>=1"}, "bad_precision"),
        ({"x_precision": "<=1"}, "bad_precision"),
        ({"x_precision": "rel_l2<=" + "9" * 5000}, "bad_precision"),
    ],
)
def test_bad_headers_are_refused(measured: ServerProcess, headers: dict[str, str], code: str) -> None:
    """And the next good request is answered."""
    body = client.infer_body("x", real_rows(1))
    reply = measured.call("POST", "/v2/models/every/infer", body, **headers)
    assert (reply.status, reply.json()["code"]) == (400, code)
    infer(measured, "every", real_rows(1))


def test_the_worst_rows_are_captured_and_can_be_replayed(
    measured: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the configuration, no more than allowed; computed again the divergence shows."""
    folder = measured.config.parent / "captures"
    infer(measured, "every", real_rows(8, seed=4))
    settled_page(measured)  # Worse rows would displace what is looked at.
    files = sorted(folder.glob("every-fp16-*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= 100_000
    capture = read_capture(files[-1])
    assert capture.inputs["x"].shape == (1, FEATURES)
    assert capture.facts.tiers["fp16"]["effective"] == "fp16-emulated"
    assert main(["replay", str(files[-1]), str(measured.config)]) == 0
    assert "the divergence shows again" in capsys.readouterr().out


def wrong(found: np.ndarray, right: np.ndarray) -> int:
    """Rows that are off by more than a tenth."""
    return int((relative_l2(found, right) > 0.1).sum())


def test_a_tier_that_drifts_loses_its_traffic_and_recovers(measured: ServerProcess, drift: Drift) -> None:
    """Within one window, at both gateways; who declared the reference never notices."""
    x = real_rows(4, seed=5)
    right = infer(measured, "every", x, x_precision="fp32").array("y")
    drift.set(0.5)
    try:
        wrong_rows = 0
        while (reply := infer(measured, "every", x)).headers["x-precision-reason"] != "budget":
            wrong_rows += wrong(reply.array("y"), right)
            assert wrong_rows <= 200, "a whole window of wrong answers"
            sensitive = infer(measured, "every", x, x_precision="sensitive")
            assert wrong(sensitive.array("y"), right) == 0
            time.sleep(0.05)
        assert wrong_rows > 0
        wait_for(lambda: reasons(measured, 20) == {"budget"})
        for declared in ("standard", "fp16", "sensitive"):
            reply = infer(measured, "every", x, x_precision=declared)
            assert wrong(reply.array("y"), right) == 0
            assert reply.headers["x-precision-tier"] == "fp32"
        told = standing(measured, "every")
        assert told["state"] == "tripped"
        assert "rel_l2 at quantile 0.9 is 0." in told["reason"]
        assert told["budget_ratio"] > 10
        scraped = page(measured)
        labels = {"model": "every", "tier": "fp16"}
        assert scraped.total("halftone_budget_state", **labels, state="tripped") == 1
        assert scraped.total("halftone_budget_state", **labels) == 1
        assert scraped.total("halftone_budget_ratio", **labels) > 10
        wait_for(lambda: page(measured).total("halftone_routed_total", tier="fp32", reason="budget") >= 23)
        before = compared_rows(measured, "every")
        for _ in range(20):  # It is measured on: rows that the reference answered.
            assert infer(measured, "every", x).headers["x-precision-reason"] == "budget"
        wait_for(lambda: compared_rows(measured, "every") >= before + 80)
        assert standing(measured, "every")["state"] == "tripped"
    finally:
        drift.set(0.0)
    seen = set()
    deadline_s = time.monotonic() + TIMEOUT_S
    while (state := standing(measured, "every")["state"]) != "serving":
        seen.add(state)
        assert wrong(infer(measured, "every", x).array("y"), right) == 0
        assert time.monotonic() < deadline_s, standing(measured, "every")
    assert "tripped" in seen
    wait_for(lambda: reasons(measured, 20) == {"default"})
    assert infer(measured, "every", x).headers["x-precision-tier"] == "fp16"


def reasons(server: ServerProcess, requests: int) -> set[str]:
    """Why requests on new connections, which reach both gateways, were answered by whom they were."""
    return {infer(server, "every", real_rows(1)).headers["x-precision-reason"] for _ in range(requests)}


def test_one_bad_pair_leaves_every_sum_finite(measured: ServerProcess, drift: Drift) -> None:
    """NaN on the tier only: the caller gets the reference's row, the page its count."""
    settled_page(measured)  # Rows that still wait to be compared would be bad as well.
    asked = 0

    def is_counted() -> bool:
        # A row that finds no idle replica is dropped, and another one asked for.
        nonlocal asked
        asked += 1
        reply = infer(measured, "every", real_rows(1), x_precision="fp16")
        assert np.isfinite(reply.array("y")).all()
        assert reply.headers["x-precision-reason"] == "escalated=nonfinite"
        return page(measured).total("halftone_divergence_nonfinite_total", model="every") >= 1

    drift.set(math.nan)
    try:
        wait_for(is_counted)
        scraped = settled_page(measured)
    finally:
        drift.set(0.0)
    assert scraped.total("halftone_divergence_nonfinite_total", model="every") <= asked
    sums = {name for name, _ in scraped.samples if name.endswith("_sum")}
    assert "halftone_divergence_sum" in sums
    assert all(math.isfinite(value) for (name, _), value in scraped.samples.items() if name in sums)
    assert scraped.total("halftone_divergence_sum", model="every", metric="rel_l2") > 0


def test_fp16_that_ruins_a_real_network_trips(measured: ServerProcess) -> None:
    """The tumour classifier: every logit finite, every answer a guess; the next tier up is right."""
    _, held_out = tumours()
    body_rows = held_out.measures
    deadline_s = time.monotonic() + TIMEOUT_S
    while (reply := infer(measured, "tumours", body_rows)).headers["x-precision-reason"] != "budget":
        assert held_out.accuracy(reply.array("y")) < 0.45
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert reply.headers["x-precision-tier"] == "mixed"
    assert held_out.accuracy(reply.array("y")) > 0.92
    # The other gateway hears of it from the hub.
    wait_for(lambda: all(standing(measured, "tumours")["state"] == "tripped" for _ in range(20)))
    assert standing(measured, "tumours", "mixed")["state"] == "serving"
    verdicts = {
        verdict: page(measured).total(
            "halftone_divergence_verdict_total", model="tumours", tier="fp16", verdict=verdict
        )
        for verdict in ("pass", "warn", "fail")
    }
    assert verdicts["fail"] > 0.9 * sum(verdicts.values())


def test_a_killed_hub_forgets_no_trip(measured: ServerProcess) -> None:
    """Gateways remember, and tell the next one."""
    assert main(["tier", "trip", "every", "fp16", "--url", f"http://127.0.0.1:{measured.port}"]) == 0
    wait_for(lambda: all(standing(measured, "every")["by_hand"] for _ in range(20)))
    wait_for(lambda: reasons(measured, 20) == {"budget"})
    [hub] = measured.processes("halftone:hub")
    os.kill(hub, signal.SIGKILL)
    answered: Counter[str] = Counter()

    def is_replaced() -> bool:
        answered[infer(measured, "every", real_rows(1)).headers["x-precision-reason"]] += 1
        return measured.processes("halftone:hub") not in ([], [hub]) and (
            measured.call("GET", "/metrics").status == 200
        )

    wait_for(is_replaced)
    for _ in range(3):
        assert reasons(measured, 20) == {"budget"}
        time.sleep(0.6)
    assert set(answered) == {"budget"}
    assert page(measured).total("halftone_budget_state", model="every", tier="fp16", state="tripped") == 1
    assert standing(measured, "every")["by_hand"]
    assert main(["tier", "reset", "every", "fp16", "--url", f"http://127.0.0.1:{measured.port}"]) == 0
    wait_for(lambda: reasons(measured, 20) == {"default"})


TOKENS_CONFIG = """
server: {tokens_file: tokens}
models:
  - name: e
    source: serving.models.echo:Echo
    tiers: {fp32: {}, fp16: {}}
    default: fp16
"""


def test_a_tier_is_set_by_those_who_have_a_token(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """401 to others, who change nothing; a replica killed in a background batch harms nobody."""
    tokens = tmp_path / "tokens"
    tokens.write_text("operator a-secret-token-0123456789\n")
    server = start(TOKENS_CONFIG.replace("tokens_file: tokens", f"tokens_file: {tokens}"))
    server.wait_for_output("Try:")
    url = f"http://127.0.0.1:{server.port}"
    bearer = {"authorization": "Bearer a-secret-token-0123456789"}
    for wrong_token in ({}, {"authorization": "Bearer nobody-s-token-0123456789"}):
        for action in ("trip", "reset"):
            reply = server.call("POST", f"/v2/models/e/tiers/fp16/{action}", **wrong_token)
            assert (reply.status, reply.json()["code"]) == (401, "unauthorized")
        assert server.call("GET", "/v2/models/e/precision", **wrong_token).status == 401
    assert main(["tier", "trip", "e", "fp16", "--url", url]) == 1
    assert "the server refused" in capsys.readouterr().err
    body = client.infer_body("x", np.ones((1, 128)))

    def reason() -> str:
        reply = server.call("POST", "/v2/models/e/infer", body, **bearer)
        assert reply.status == 200
        return reply.headers["x-precision-reason"]

    assert reason() == "default"
    with_token = ["--url", url, "--tokens-file", str(tokens), "--reason", "new driver"]
    assert main(["tier", "trip", "e", "fp16", *with_token]) == 0
    wait_for(lambda: reason() == "budget")
    told = server.call("GET", "/v2/models/e/precision", **bearer).json()["tiers"]["fp16"]
    assert (told["state"], told["by_hand"]) == ("tripped", True)
    assert told["reason"] == "tripped by hand: 'new driver'"
    assert main(["tier", "reset", "e", "fp16", *with_token]) == 0
    wait_for(lambda: reason() == "default")
    assert server.interrupt() == 0, server.output
