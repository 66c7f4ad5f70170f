"""What `halftone serve` prints when it is ready: each tier, measured on the model's own example."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.config import Config, ModelConfig
from serving.runtime.local_client import LocalClient
from serving.runtime.tier_plan import plan_tiers

HTTP_OK = 200
#: Calls per tier; the fastest is printed, since a start-up is a noisy moment.
SAMPLE_CALLS = 3


@dataclass(frozen=True, slots=True)
class _Answer:
    outputs: dict[str, Any]
    headers: dict[str, str]
    latency_ms: float


def summarise(config: Config, client: LocalClient, say: Callable[[str], None]) -> None:
    """Print every model's tiers, and lines to paste."""
    threads = {(plan.model.name, plan.tier): plan.threads for plan in plan_tiers(config)}
    shown = None
    for model in config.models:
        status, metadata = client.get(f"/v2/models/{model.name}")
        if status != HTTP_OK:
            continue
        answers = _sample(model, client, metadata)
        shown = shown or (model if answers else None)
        say("")
        say(f"model {model.name}  ({_signature(metadata)})")
        say(_table(_rows(model, metadata, answers, threads)))
        for tier, facts in metadata["tiers"].items():
            say_conversion(model, tier, facts, say)
    say("")
    say("Try:")
    for line in _curl_lines(shown or config.models[0], client):
        say(f"  {line}")
    say("")


def say_conversion(model: ModelConfig, tier: str, facts: Any, say: Callable[[str], None]) -> None:
    """What the conversion kept or changed, in a line or two; the metadata has it in full."""
    where = f"GET /v2/models/{model.name}"
    if reason := facts.get("unavailable"):
        say(f"  {tier}: requests get 409: {reason}")
    if losses := facts.get("weight_losses"):
        say(f"  {tier}: 16 bits cannot hold some weights of {len(losses)} tensors ({where} lists them)")
    if kept := facts.get("kept_fp32"):
        shown = ", ".join(kept[:3]) + (f" and {len(kept) - 3} more" if len(kept) > 3 else "")  # noqa: PLR2004
        say(f"  {tier}: stay FP32: {shown}")


def _sample(model: ModelConfig, client: LocalClient, metadata: Any) -> dict[str, _Answer]:
    """The model's example, answered by every ready tier."""
    _, example = client.get(f"/v2/models/{model.name}/example")
    answers = {}
    for tier in (name for name, facts in metadata["tiers"].items() if facts["ready"]):
        latencies_ms = []
        for _ in range(SAMPLE_CALLS):
            started_s = time.perf_counter()
            status, headers, document = client.infer(model.name, example, tier)
            latencies_ms.append((time.perf_counter() - started_s) * 1000)
        if status == HTTP_OK:
            outputs = {output["name"]: output for output in document["outputs"]}
            answers[tier] = _Answer(outputs, headers, min(latencies_ms))
    return answers


def _rows(
    model: ModelConfig, metadata: Any, answers: dict[str, _Answer], threads: dict[tuple[str, str], int]
) -> list[tuple[str, ...]]:
    reference = next((tier for tier in model.tiers if model.kind(tier) == "fp32"), None)
    rows: list[tuple[str, ...]] = [
        ("tier", "replicas", "device", "threads", "effective precision", "sample", "rel. difference")
    ]
    for tier, facts in metadata["tiers"].items():
        answer = answers.get(tier)
        rows.append(
            (
                tier,
                str(facts["replicas"]),
                facts.get("device", "-"),
                str(threads[model.name, tier]),
                facts.get("effective", "refused" if "unavailable" in facts else "-"),
                f"{answer.latency_ms:.1f} ms" if answer else "-",
                _difference(tier, reference, answers),
            )
        )
    return rows


def _difference(tier: str, reference: str | None, answers: dict[str, _Answer]) -> str:
    """Relative L2 distance to the reference over the example, the largest of the outputs."""
    if tier == reference and tier in answers:
        return "reference"
    if reference is None or tier not in answers or reference not in answers:
        return "-"
    distances = [
        relative_l2(np.asarray(output["data"], np.float64), np.asarray(expected["data"], np.float64))
        for name, expected in answers[reference].outputs.items()
        if (output := answers[tier].outputs[name])["datatype"].startswith("FP")
    ]
    return f"{max(distances):.1e}" if distances else "-"


def relative_l2(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """‖found - expected‖₂ / ‖expected‖₂, over all elements together."""
    tiny = float(np.finfo(np.float64).tiny)
    return float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), tiny))


def _signature(metadata: Any) -> str:
    def side(tensors: Iterable[Any]) -> str:
        return ", ".join(f"{t['name']}: {t['datatype']} {t['shape']}" for t in tensors)

    return f"{side(metadata['inputs'])} -> {side(metadata['outputs'])}"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _curl_lines(model: ModelConfig, client: LocalClient) -> list[str]:
    url = f"{client.url}/v2/models/{model.name}"
    options = client.curl_options
    lines = [f"curl -s {options}{url}/example > sample.json"]
    lines += [
        f"curl -si {options}{url}/infer -H 'X-Precision: {name}' --json @sample.json"
        for name in (*model.tiers, *list(model.classes)[:1])
    ]
    return [*lines, f"curl -s {options}{client.url}/metrics | grep ^halftone_"]
