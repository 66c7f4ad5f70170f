"""A running Prometheus for tests, with the rules that operators get, at a test's pace."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from known_metrics import ALERTS, RULES
from server_process import free_port

CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}}
rule_files: [{rules}, {alerts}]
scrape_configs:
  - job_name: halftone
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  # Under names of their own: rules sum over whatever is called halftone_*.
  - job_name: halftone_processes
    http_sd_configs: [{{url: "http://127.0.0.1:{port}/metrics/processes", refresh_interval: 1s}}]
    metric_relabel_configs:
      - source_labels: [__name__]
        regex: "halftone_(.*)"
        target_label: __name__
        replacement: "by_process_$1"
"""
TIMEOUT_S = 90.0


class PrometheusProcess:
    """What was scraped, by PromQL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as answer:  # noqa: S310
            return json.load(answer)["data"]

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Labels -> value, now."""
        result = self.get("query", query=expression)["result"]
        return {tuple(sorted(found["metric"].items())): float(found["value"][1]) for found in result}

    def value(self, expression: str) -> float | None:
        """The one value of an expression; None where it has none."""
        found = self.query(expression)
        return next(iter(found.values())) if len(found) == 1 else None

    def scraped(self, selector: str) -> dict[tuple[tuple[str, str], ...], list[float]]:
        """Labels -> every value that was scraped, in order."""
        result = self.get("query", query=f"{selector}[1h]")["result"]
        return {
            tuple(sorted(found["metric"].items())): [float(value) for _, value in found["values"]]
            for found in result
        }

    def firing(self) -> set[tuple[str, str, str]]:
        """Alert, model and tier."""
        alerts = [alert for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"]
        return {
            (labels["alertname"], labels.get("model", ""), labels.get("tier", ""))
            for labels in (alert["labels"] for alert in alerts)
        }


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        time.sleep(0.2)


@contextmanager
def running_prometheus(program: str, folder: Path, port: int) -> Iterator[PrometheusProcess]:
    """Scrapes the server on `port`, twice a second."""
    own_port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(rules=RULES, alerts=ALERTS, port=port), encoding="utf-8")
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{own_port}", "--enable-feature=exemplar-storage"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        found = PrometheusProcess(f"http://127.0.0.1:{own_port}")

        def scrapes() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            try:
                return found.value('up{job="halftone"}') == 1
            except OSError:
                return False

        wait_for(scrapes, "the first scrape")
        yield found
    finally:
        process.terminate()
        process.wait(30)
