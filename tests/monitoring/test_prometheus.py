"""A real Prometheus scrapes a running server: rules, alerts, and totals that outlive their processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import client
import numpy as np
import pytest
from known_metrics import ALERTS, RULES, groups
from prometheus_client.parser import text_string_to_metric_families
from prometheus_process import PrometheusProcess, running_prometheus, wait_for
from server_process import ServerProcess, ready_server

# `strict` cannot keep its budget at 16 bits, and is measured to: an induced drift.
CONFIG = """
server: {gateways: 2}
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp32: {replicas: 2}, fp16: {replicas: 2}}
    divergence: {sample: 1.0}
  - name: strict
    source: serving.models.echo:Echo
    tiers: {fp32: {}, fp16: {}}
    divergence: {sample: 1.0, budget: 1.0e-7, min_samples: 20, window: 100, cooldown_s: 3600}
"""
COUNTED = '{__name__=~"halftone_.*(_total|_count|_sum|_bucket)"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A ready server of two gateways and six replicas."""
    with ready_server(tmp_path_factory.mktemp("server"), CONFIG) as process:
        yield process


@pytest.fixture(scope="module")
def scraped(
    server: ServerProcess, prometheus: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusProcess]:
    """Prometheus, scraping it."""
    with running_prometheus(prometheus, tmp_path_factory.mktemp("prometheus"), server.port) as process:
        yield process


def ask(server: ServerProcess, model: str, tier: str, times: int) -> None:
    """Requests of three rows, all answered."""
    rows = np.random.default_rng(7).standard_normal((3, 128)) * 3
    body = client.infer_body("x", rows)
    for _ in range(times):
        reply = server.call("POST", f"/v2/models/{model}/infer", body, x_precision=tier)
        assert reply.status == 200, reply.body


def on_page(server: ServerProcess, name: str, **labels: str) -> float:
    """The sum of a page's samples of that name and these labels."""
    page = server.call("GET", "/metrics")
    assert page.status == 200, page.body
    return sum(
        sample.value
        for family in text_string_to_metric_families(page.body.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def answered(server: ServerProcess) -> float:
    """Requests that the page counts."""
    return on_page(server, "halftone_requests_total", model="echo", code="200")


def buckets(server: ServerProcess) -> np.ndarray:
    """Ends and cumulative counts of the echo model's durations at FP16: [buckets, 2]."""
    page = server.call("GET", "/metrics").body.decode()
    return np.array(
        [
            (float(sample.labels["le"]), sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "halftone_request_duration_seconds_bucket"
            and (sample.labels["model"], sample.labels["tier"]) == ("echo", "fp16")
        ]
    )


def quantile(ends: np.ndarray, counts: np.ndarray, share: float) -> float:
    """As `histogram_quantile` has it: linear within a bucket."""
    rank = share * counts[-1]
    place = int(np.searchsorted(counts, rank))
    below, start = (counts[place - 1], ends[place - 1]) if place else (0.0, 0.0)
    return float(start + (ends[place] - start) * (rank - below) / (counts[place] - below))


def test_the_page_is_what_promtool_calls_well_made(server: ServerProcess, promtool: str) -> None:
    """Names, units, help texts, types."""
    ask(server, "echo", "fp16", 5)
    page = server.call("GET", "/metrics").body
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_every_process_can_be_scraped_by_itself(server: ServerProcess, scraped: PrometheusProcess) -> None:
    """Two gateways and the hub, found by Prometheus; their figures add up to the one page's."""
    ask(server, "echo", "fp32", 5)
    wait_for(lambda: scraped.value('count(up{job="halftone_processes"} == 1)') == 3, "three processes")
    own = 'sum(by_process_requests_total{model="echo",code="200"})'
    wait_for(lambda: scraped.value(own) == answered(server), "the same sum")
    assert scraped.value("count(count by (instance) (by_process_requests_total))") == 2
    assert scraped.value("count(by_process_replicas{state='serving'})") is not None


def test_rules_evaluate_and_agree_with_the_page(server: ServerProcess, scraped: PrometheusProcess) -> None:
    """Recorded quantiles and shares are those of the page's own figures."""
    wait_for(lambda: scraped.value('halftone_requests_total{model="echo",tier="fp16"}') is not None, "series")
    sent = answered(server) + 90
    ask(server, "echo", "fp16", 60)
    ask(server, "echo", "fp32", 30)
    wait_for(
        lambda: (scraped.value("sum(halftone_requests_total{model='echo',code='200'})") or 0) >= sent,
        "every request scraped",
    )
    selector = 'halftone_request_duration_seconds_bucket{model="echo",tier="fp16"}'
    first = {float(dict(labels)["le"]): values[0] for labels, values in scraped.scraped(selector).items()}
    after = buckets(server)
    # A rate knows what came after the first scrape, and widens each bucket's own span a little to
    # the edges of its window, so that quantiles within a bucket are not equal to the last digit.
    counts = after[:, 1] - [first[end] for end in after[:, 0]]
    assert counts[-1] >= 60
    for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
        recorded = f"model_tier:halftone_request_duration_seconds:{name}_5m" + '{model="echo",tier="fp16"}'
        wanted = quantile(after[:, 0], counts, share)
        wait_for(lambda e=recorded, w=wanted: scraped.value(e) == pytest.approx(w, rel=0.2), recorded)
    wait_for(lambda: rate(scraped, "fp16") > rate(scraped, "fp32") > 0, "rates of both tiers")
    wait_for(
        lambda: (
            (
                scraped.value(
                    'model_tier_output_metric:halftone_divergence:p99_1h{model="echo",metric="rel_l2"}'
                )
                or 0
            )
            > 1e-5
        ),
        "a divergence",
    )
    rules = [rule for group in scraped.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {
        rule.get("record") or rule["alert"] for rule in (*groups(RULES), *groups(ALERTS))
    }
    wait_for(lambda: not unwell(scraped), "every rule has been evaluated")


def rate(scraped: PrometheusProcess, tier: str) -> float:
    """Rows a second of the echo model, as recorded; 0 before they are."""
    return scraped.value(f'model_tier:halftone_rows:rate5m{{model="echo",tier="{tier}"}}') or 0.0


def unwell(scraped: PrometheusProcess) -> list[Any]:
    """Rules that failed, or have not run yet."""
    rules = [rule for group in scraped.get("rules")["groups"] for rule in group["rules"]]
    return [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"]


def test_exemplars_arrive(server: ServerProcess, scraped: PrometheusProcess) -> None:
    """Prometheus asks for OpenMetrics, and gets a request's id beside its bucket."""
    ask(server, "echo", "fp16", 5)

    def ids() -> set[str]:
        found = scraped.get(
            "query_exemplars",
            query="halftone_request_duration_seconds_bucket",
            start=str(0),
            end=str(2**33),
        )
        return {one["labels"].get("request_id", "") for series in found for one in series["exemplars"]}

    wait_for(lambda: any(ids()), "an exemplar")


def test_an_alert_fires_when_a_tier_drifts(server: ServerProcess, scraped: PrometheusProcess) -> None:
    """Measured: the budget trips, and its burn is recorded."""
    ask(server, "strict", "fp16", 20)
    alert = ("HalftoneTierTripped", "strict", "fp16")
    wait_for(lambda: alert in scraped.firing(), "the alert")
    burn = scraped.value('model_tier:halftone_budget_burn:ratio_rate1h{model="strict"}')
    assert burn == pytest.approx(100)  # Every row is over, one in a hundred may be.
    assert ("HalftoneTierTripped", "echo", "fp16") not in scraped.firing()


def test_an_alert_fires_and_clears(server: ServerProcess, scraped: PrometheusProcess) -> None:
    """Tripped and reset by hand."""
    alert = ("HalftoneTierTripped", "echo", "fp16")
    assert server.call("POST", "/v2/models/echo/tiers/fp16/trip").status == 200
    wait_for(lambda: alert in scraped.firing(), "the alert")
    assert server.call("POST", "/v2/models/echo/tiers/fp16/reset").status == 200
    wait_for(lambda: alert not in scraped.firing(), "its end")


def shows_page(server: ServerProcess) -> bool:
    """Whether a scrape succeeds; a connection may end with the gateway that had taken it."""
    try:
        return server.call("GET", "/metrics").status == 200
    except OSError:
        return False


def kill_one(server: ServerProcess, title: str, sent: float) -> None:
    """Kill one process with that title; the page that follows shows every total, and another one comes."""
    victims = server.processes(title)
    os.kill(victims[0], signal.SIGKILL)
    wait_for(lambda: victims[0] not in server.processes(title), "its end")
    wait_for(lambda: shows_page(server), f"a page after {title} died")
    assert answered(server) == sent
    wait_for(lambda: len(server.processes(title)) == len(victims), f"another {title}")
    wait_for(lambda: server.call("GET", "/v2/health/ready").status == 200, "ready")


def test_no_total_falls_when_processes_are_killed(server: ServerProcess, scraped: PrometheusProcess) -> None:
    """Replicas, a gateway, the hub: each once, with traffic between, and the totals stay exact."""
    sent = answered(server)
    restarts = on_page(server, "halftone_replica_restarts_total", model="echo", tier="fp16")
    for title in ("echo:fp16", "gateway", "hub", "echo:fp32", "hub"):
        ask(server, "echo", "fp16", 20)
        sent += 20
        wait_for(lambda sent=sent: answered(server) == sent, f"the figures before {title} dies")
        kill_one(server, f"halftone:{title}", sent)
    wait_for(
        lambda: on_page(server, "halftone_replica_restarts_total", model="echo", tier="fp16") == restarts + 1,
        "the restart is counted",
    )
    wait_for(
        lambda: scraped.value("sum(halftone_requests_total{model='echo',code='200'})") == sent, "scraped"
    )
    totals = scraped.scraped(COUNTED)
    assert len(totals) > 300
    assert {labels for labels, values in totals.items() if values != sorted(values)} == set()
    serving = on_page(server, "halftone_replicas", model="echo", tier="fp16", state="serving")
    assert serving == 2
