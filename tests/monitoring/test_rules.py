"""Recording rules and alerts: they load, fire on what they are for only, and name what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from known_metrics import ALERTS, ROOT, RULES, exposed, groups, series, unknown_in

RULES_TEST = Path(__file__).parent / "rules_test.yaml"


def run(*command: str) -> str:
    """What a command printed; its failure fails the test with that."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_scrape_configuration_and_its_rules_load(promtool: str) -> None:
    """As the operator's Prometheus reads them."""
    run(promtool, "check", "config", str(ROOT / "deployments/prometheus/prometheus.yml"))


def test_rules_record_and_alerts_fire_on_what_they_are_for(promtool: str, tmp_path: Path) -> None:
    """On series that must fire, and series that must not."""
    tests = RULES_TEST.read_text(encoding="utf-8").replace("  - RULES\n", f"  - {RULES}\n  - {ALERTS}\n")
    (tmp_path / "rules_test.yaml").write_text(tests, encoding="utf-8")
    run(promtool, "test", "rules", str(tmp_path / "rules_test.yaml"))


@pytest.mark.parametrize(
    "rule", [*groups(RULES), *groups(ALERTS)], ids=lambda rule: rule.get("record") or rule["alert"]
)
def test_a_rule_names_only_what_is_exposed(rule: dict[str, str]) -> None:
    """Series and labels of the code, or of a rule."""
    assert unknown_in(rule["expr"]) == []


def test_every_alert_is_seen_to_fire() -> None:
    """By the tests of the rules."""
    fired = set(re.findall(r'alertname="(\w+)"', RULES_TEST.read_text(encoding="utf-8")))
    assert fired == {rule["alert"] for rule in groups(ALERTS)}


def test_every_alert_leads_to_its_section_of_the_manual() -> None:
    """`runbook` is a file and an anchor that exists there."""
    for rule in groups(ALERTS):
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor == rule["alert"].lower()
        assert rule["alert"] in headings


def test_the_check_notices_what_does_not_exist() -> None:
    """A series, a label in a matcher, a grouping, a legend."""
    assert unknown_in("halftone_rows_total{tier='x'}", "{{model}}") == []
    assert unknown_in("halftone_rows") == ["series halftone_rows"]
    assert unknown_in('halftone_rows_total{replica="x"}') == ["label replica of halftone_rows_total"]
    assert unknown_in("sum by (pod) (halftone_rows_total)") == ["label pod"]
    assert unknown_in("halftone_rows_total", "{{pod}}") == ["legend pod"]


def test_recorded_names_say_their_labels() -> None:
    """`LABELS:METRIC:HOW`, the metric one that is exposed, or what was made of it."""
    for rule in groups(RULES):
        labels, metric, _ = rule["record"].split(":")
        assert set(labels.split("_")) <= {"model", "tier", "output", "metric"}
        assert metric.startswith("halftone_")
    assert len(series()) > len(exposed())
