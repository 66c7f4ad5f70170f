"""Writes `dashboards/halftone.json`: `python deployments/grafana/build_dashboard.py`.

A dashboard is long where it is JSON and short where it is what the panels ask. A test holds the file
equal to what this writes, and every query to series and labels that exist.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parent / "dashboards" / "halftone.json"
#: The variables at the top of the page.
PICKED = 'model=~"$model",tier=~"$tier"'
PICKED_OUTPUT = f'{PICKED},metric="$metric"'
TIER = "{{model}}/{{tier}}"
OUTPUT = "{{model}}/{{tier}} {{output}}"
COLUMNS = 24

Json = dict[str, Any]


@dataclass(frozen=True)
class Query:
    """One PromQL expression and how its series are named."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel: a graph unless told otherwise."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    log_scale: bool = False


def _model_tier(name: str, legend: str = TIER) -> Query:
    return Query(f"{name}{{{PICKED}}}", legend)


ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel(
            "Tiers in service",
            "1 where a tier answers its own traffic; 0 where its budget moved that to a more precise one.",
            (Query(f'max by (model, tier) (halftone_budget_state{{{PICKED},state="serving"}})', TIER),),
            kind="stat",
        ),
        Panel(
            "What arithmetic runs",
            "As the probe measured it on the replicas.",
            (Query(f"halftone_tier_info{{{PICKED}}}", "{{model}}/{{tier}}: {{effective}} on {{soc}}"),),
            kind="stat",
        ),
        Panel(
            "Firing alerts",
            "Of Halftone's own rules.",
            (
                Query(
                    'ALERTS{alertname=~"Halftone.*",alertstate="firing"}', "{{alertname}} {{model}}/{{tier}}"
                ),
            ),
            kind="stat",
        ),
    ),
    "Traffic": (
        Panel(
            "Requests",
            "By the tier that answered.",
            (_model_tier("model_tier:halftone_requests:rate5m"),),
            unit="reqps",
        ),
        Panel(
            "Rows", "Computed and answered.", (_model_tier("model_tier:halftone_rows:rate5m"),), unit="rowsps"
        ),
        Panel(
            "Refused",
            "By error code.",
            (
                Query(
                    f"sum by (model, tier, reason) (rate(halftone_rejected_total{{{PICKED}}}[5m]))",
                    "{{model}}/{{tier}} {{reason}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            "Duration",
            "50th, 95th and 99th percentile, from the parsed head of a request to its answer.",
            tuple(
                _model_tier(f"model_tier:halftone_request_duration_seconds:{share}_5m", f"{TIER} {share}")
                for share in ("p50", "p95", "p99")
            ),
            unit="s",
        ),
        Panel(
            "Queue and device",
            "99th percentile of waiting for a batch, and of computing one.",
            (
                _model_tier("model_tier:halftone_queue_duration_seconds:p99_5m", f"{TIER} queue"),
                _model_tier("model_tier:halftone_compute_duration_seconds:p99_5m", f"{TIER} device"),
            ),
            unit="s",
        ),
        Panel(
            "Rows waiting and in flight",
            "Beyond max_queue_rows requests are refused.",
            (
                Query(f"sum by (model, tier) (halftone_queue_rows{{{PICKED}}})", f"{TIER} waiting"),
                Query(f"sum by (model, tier) (halftone_inflight_rows{{{PICKED}}})", f"{TIER} in flight"),
            ),
        ),
        Panel(
            "Who asked for what",
            "By what requests declared, the tier that this bound them to, and why.",
            (
                Query(
                    f"sum by (model, declared, tier, reason) (rate(halftone_routed_total{{{PICKED}}}[5m]))",
                    "{{model}} {{declared}} → {{tier}} ({{reason}})",
                ),
            ),
            unit="reqps",
            width=16,
        ),
        Panel(
            "Rows of a batch",
            "On average.",
            (_model_tier("model_tier:halftone_batch_rows:mean5m"),),
        ),
    ),
    "Precision": (
        Panel(
            "Divergence from FP32, and the floor",
            "50th and 99th percentile of an hour's compared rows; what FP32 has against itself; the budget.",
            (
                Query(
                    f"model_tier_output_metric:halftone_divergence:p50_1h{{{PICKED_OUTPUT}}}", f"{OUTPUT} p50"
                ),
                Query(
                    f"model_tier_output_metric:halftone_divergence:p99_1h{{{PICKED_OUTPUT}}}", f"{OUTPUT} p99"
                ),
                Query(
                    'model_output_metric:halftone_divergence_floor:p99_1d{model=~"$model",metric="$metric"}',
                    "{{model}} {{output}} floor",
                ),
                Query(f'halftone_budget_limit{{{PICKED},metric="$metric"}}', f"{TIER} budget"),
            ),
            width=16,
            log_scale=True,
        ),
        Panel(
            "Divergence distribution",
            "Compared rows by their distance, over the time that is shown.",
            (
                Query(
                    "sum by (le) "
                    f"(increase(halftone_divergence_bucket{{{PICKED_OUTPUT}}}[$__rate_interval]))",
                    "{{le}}",
                ),
            ),
            kind="heatmap",
        ),
        Panel(
            "Budget burn",
            "1: as many rows are over the budget as it allows. Over 5 minutes and an hour.",
            (
                _model_tier("model_tier:halftone_budget_burn:ratio_rate5m", f"{TIER} 5 min"),
                _model_tier("model_tier:halftone_budget_burn:ratio_rate1h", f"{TIER} 1 h"),
            ),
        ),
        Panel(
            "Verdicts",
            "Of compared rows: pass, warn or fail.",
            (
                Query(
                    "sum by (model, tier, verdict) "
                    f"(rate(halftone_divergence_verdict_total{{{PICKED}}}[5m]))",
                    "{{model}}/{{tier}} {{verdict}}",
                ),
            ),
            unit="rowsps",
        ),
        Panel(
            "Escalated rows",
            "Overflowed their format and were computed again at FP32.",
            (_model_tier("model_tier:halftone_escalated_rows:ratio_rate5m"),),
            unit="percentunit",
        ),
        Panel(
            "Evidence",
            "Sampled rows that were compared, dropped because the reference was busy, or failed.",
            (
                Query(
                    f"sum by (model, tier, outcome) (rate(halftone_shadow_rows_total{{{PICKED}}}[5m]))",
                    "{{model}}/{{tier}} {{outcome}}",
                ),
            ),
            unit="rowsps",
        ),
        Panel(
            "Decisions that change",
            "Compared rows whose largest element, or five largest elements, are not the reference's.",
            tuple(
                Query(
                    f"sum by (model, tier, output) (rate(halftone_{name}_disagreement_total{{{PICKED}}}[1h]))",
                    f"{OUTPUT} {name}",
                )
                for name in ("top1", "top5")
            ),
            unit="rowsps",
        ),
    ),
    "Replicas and cards": (
        Panel(
            "Replicas by state",
            "Loading, serving, degraded, refused, failed.",
            (
                Query(
                    f"sum by (model, tier, state) (halftone_replicas{{{PICKED}}}) > 0",
                    "{{model}}/{{tier}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Restarts",
            "Replicas that began in place of one that ended without a goodbye, over an hour.",
            (
                Query(
                    f"sum by (model, tier) (increase(halftone_replica_restarts_total{{{PICKED}}}[1h]))", TIER
                ),
            ),
        ),
        Panel(
            "Memory of tiers",
            "Of a tier's replicas together.",
            (
                Query(
                    f"sum by (model, tier, kind) (halftone_device_memory_bytes{{{PICKED}}})",
                    "{{model}}/{{tier}} {{kind}}",
                ),
            ),
            unit="bytes",
        ),
        Panel(
            "NPU utilisation",
            "Of the npu-exporter, where it runs.",
            (Query("max by (instance, id) (npu_chip_info_utilization)", "{{instance}} NPU {{id}}"),),
            unit="percent",
        ),
        Panel(
            "NPU memory",
            "Of the npu-exporter, where it runs.",
            (
                Query(
                    "max by (instance, id) (npu_chip_info_hbm_used_memory)"
                    " / max by (instance, id) (npu_chip_info_hbm_total_memory)",
                    "{{instance}} NPU {{id}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "NPU health and temperature",
            "Of the npu-exporter, where it runs; health is 1 where it is well.",
            (
                Query("max by (instance, id) (npu_chip_info_temperature)", "{{instance}} NPU {{id}} °C"),
                Query(
                    "min by (instance, id) (npu_chip_info_health_status)", "{{instance}} NPU {{id}} health"
                ),
            ),
        ),
    ),
}


def dashboard() -> Json:
    """The whole document."""
    panels: list[Json] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            }
        )
        left, top = 0, top + 1
        for panel in row:
            if left + panel.width > COLUMNS:
                left, top = 0, top + panel.height
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            panels.append(_panel(panel, len(panels) + 1, place))
            left += panel.width
        top += row[-1].height
    return {
        "uid": "halftone",
        "title": "Halftone",
        "description": "Throughput, latency and divergence of every tier.",
        "tags": ["halftone"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "label": "Prometheus",
                    "query": "prometheus",
                },
                _variable("model", "Model", "label_values(halftone_tier_info, model)"),
                _variable("tier", "Tier", 'label_values(halftone_tier_info{model=~"$model"}, tier)'),
                _variable("metric", "Metric", "label_values(halftone_budget_limit, metric)", several=False),
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: Json) -> Json:
    custom: Json = {"showPoints": "never", "lineWidth": 1}
    if panel.log_scale:
        custom["scaleDistribution"] = {"type": "log", "log": 10}
    document: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "gridPos": place,
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": custom if panel.kind == "timeseries" else {}},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "exemplar": panel.title == "Duration",
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for index, query in enumerate(panel.queries)
        ],
        "options": {},
    }
    if panel.kind == "stat":
        document["options"] = {
            "textMode": "value_and_name" if panel.title == "Tiers in service" else "name",
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False},
        }
    return document


_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _variable(name: str, label: str, query: str, *, several: bool = True) -> Json:
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        "allValue": ".*" if several else None,
        "current": {"text": "All", "value": "$__all"} if several else {},
    }


if __name__ == "__main__":
    DASHBOARD.parent.mkdir(exist_ok=True)
    DASHBOARD.write_text(json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
