"""What the code exposes: every family, its type and labels; and what a PromQL expression asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, Metric

from serving.config import ModelConfig
from serving.observe.metrics import GatewayMetrics
from serving.runtime.precision_ledger import PrecisionLedger
from serving.runtime.replica_ledger import Announcement, ReplicaLedger

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deployments/prometheus/halftone_rules.yml"
ALERTS = ROOT / "deployments/prometheus/halftone_alerts.yml"
MODEL = {"name": "m", "source": "a:b", "tiers": {"fp32": {}, "fp16": {}}}
#: What Prometheus itself adds.
TARGET_LABELS = frozenset({"job", "instance"})
#: Of the npu-exporter, which is not ours: its documentation lists them, values in MB and percent.
NPU_EXPORTER = {
    f"npu_chip_info_{name}": frozenset({"id"}) | TARGET_LABELS
    for name in ("utilization", "hbm_used_memory", "hbm_total_memory", "health_status", "temperature")
}
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True)
class Exposed:
    """One metric family of ours."""

    name: str
    type: str
    labels: frozenset[str]
    documentation: str

    @property
    def full_name(self) -> str:
        """As on the page: counters end with `_total`."""
        return f"{self.name}_total" if self.type == "counter" else self.name


def exposed() -> dict[str, Exposed]:
    """Every family, by its name on the page."""
    metrics = GatewayMetrics(CollectorRegistry())
    instruments = [value for value in vars(metrics).values() if value is not metrics.registry]
    labels = {
        instrument._name: getattr(instrument, "_labelnames", None) or instrument._labels
        for instrument in instruments
    }
    found = [_exposed(family, labels[family.name]) for family in metrics.registry.collect()]
    found += [
        _exposed(family, {name for sample in family.samples for name in sample.labels})
        for registry in _ledgers()
        for family in registry.collect()
    ]
    return {family.full_name: family for family in found}


def _ledgers() -> list[CollectorRegistry]:
    models = [ModelConfig.model_validate(MODEL)]
    precision, replicas = PrecisionLedger(models), ReplicaLedger(models)
    # A gauge that has no series before something was measured.
    precision._ratio.labels("m", "fp16").set(1)
    replicas.take(Announcement("m:fp16", "a", "serving", {"rss": 1}))
    return [precision.registry, replicas.registry]


def _exposed(family: Metric, labels: Any) -> Exposed:
    return Exposed(family.name, family.type, frozenset(labels), family.documentation)


def groups(path: Path) -> list[dict[str, Any]]:
    """Every rule of a rule file."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def series() -> dict[str, frozenset[str]]:
    """Every series that can be asked for, recorded ones included, with its labels."""
    found = {
        family.name + suffix: family.labels | ({"le"} if suffix == "_bucket" else frozenset()) | TARGET_LABELS
        for family in exposed().values()
        for suffix in _SUFFIXES[family.type]
    }
    for rule in groups(RULES):
        # The labels stand in the name's first part: `model_tier:…`.
        found[rule["record"]] = frozenset(rule["record"].split(":")[0].split("_"))
    return {**found, **NPU_EXPORTER, "up": TARGET_LABELS}


_SELECTOR = re.compile(r"([a-z_]*:?(?:halftone|npu_chip)[\w:]*|\bup\b)\s*(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def unknown_in(expression: str, legend: str = "") -> list[str]:
    """What an expression, or the legend of its series, names and nobody exposes."""
    known = series()
    problems = []
    labels: set[str] = set()
    for name, matchers in _SELECTOR.findall(expression):
        if name not in known:
            problems.append(f"series {name}")
            continue
        labels |= known[name]
        asked = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)
        problems += [f"label {label} of {name}" for label in asked if label not in known[name]]
    grouped = {word.strip() for group in _GROUPING.findall(expression) for word in group.split(",")}
    problems += [f"label {label}" for label in grouped - labels if label]
    problems += [
        f"legend {label}" for label in re.findall(r"\{\{\s*(\w+)\s*\}\}", legend) if label not in labels
    ]
    return problems
