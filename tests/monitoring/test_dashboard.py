"""The Grafana dashboard: what its script writes, and no panel asks for what does not exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import yaml
from known_metrics import ALERTS, ROOT, groups, unknown_in

GRAFANA = ROOT / "deployments/grafana"


def script() -> ModuleType:
    """`build_dashboard.py`, imported from its path."""
    spec = importlib.util.spec_from_file_location("build_dashboard", GRAFANA / "build_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "dashboards/halftone.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]


def test_the_file_is_what_the_script_writes() -> None:
    """Edit the script, run it, commit both."""
    assert script().dashboard() == DASHBOARD


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"])
def test_a_panel_asks_for_what_exists(target: dict[str, str]) -> None:
    """Series and labels, in the expression and in the legend; alerts that are ours."""
    if target["expr"].startswith("ALERTS{"):
        asked = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert asked <= {"alertname", "model", "tier"}
        assert all(rule["alert"].startswith("Halftone") for rule in groups(ALERTS))
        return
    assert unknown_in(target["expr"], target["legendFormat"]) == []


def test_variables_ask_for_what_exists_and_panels_use_them() -> None:
    """Each is used, and each that is used is there."""
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    for variable in variables.values():
        if variable["type"] == "query":
            selector, label = re.fullmatch(
                r"label_values\((.*), (\w+)\)", variable["query"]["query"]
            ).groups()  # type: ignore[union-attr]
            assert unknown_in(selector, f"{{{{{label}}}}}") == []
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == set(variables)


def test_panels_do_not_overlap() -> None:
    """Each cell of the grid once, within its width."""
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_provisioning_files_are_yaml_of_version_one() -> None:
    """As Grafana reads them."""
    files = sorted(GRAFANA.glob("provisioning/*/*.yml"))
    assert len(files) == 2
    assert all(yaml.safe_load(path.read_text(encoding="utf-8"))["apiVersion"] == 1 for path in files)
