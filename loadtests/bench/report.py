"""The result document, its ratios, the table and the picture."""

from __future__ import annotations

import datetime as dt
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from loadtests.bench.bar_chart import Bar, Panel
from loadtests.bench.contender import CONTENDERS, OURS, PEERS_BIN
from loadtests.bench.measurement import CONNECTIONS, Figures
from loadtests.result_file import machine

MAX_ROWS = "32"
MEANINGS = {
    "echo/<peer>, model/<peer>": "Halftone's requests/s over the peer's at 32 connections (@128: at 128)",
    "model/torch_loop": f"Halftone's rows/s over the bare torch loop's with batches of {MAX_ROWS}",
    "open_p99/<peer>, open_p99_echo/<peer>": "Halftone's open-loop p99 over the peer's, model and echo; "
    "below 1 Halftone is ahead. Each server at 70 % of its own highest closed-loop rate",
    "open_p99_same_rate/<peer>, open_p99_same_rate_echo/<peer>": "the same, Halftone under the peer's load",
    "p50_alone/<peer>": "a lone client's p50 on echo, Halftone's over the peer's",
    "model_p99/bound": "Halftone's p99 at 32 connections over 2 x (the time of a batch of 32 + 2 ms)",
}
_OUR_PACKAGES = ("ray", "torch", "httptools", "numpy", "uvloop")
_PEER_PACKAGES = ("bentoml", "litserve", "mlserver", "mosec", "torch", "numpy")

_HEADING = (
    "| server | alone, p50 | 32 connections | 128 connections | Halftone ÷ it | open loop, p99 "
    "| Halftone's at that load |"
)
#: Of a reason in the table; the document has all of it.
_REASON_LENGTH = 160

Results = dict[str, dict[str, Figures]]


def medians(rounds: Sequence[Any]) -> Any:
    """The median of each figure over rounds that are nested alike; what is no number, of the last one."""
    last = rounds[-1]
    if isinstance(last, Mapping):
        return {key: medians([one[key] for one in rounds if key in one]) for key in last}
    if isinstance(last, bool) or not isinstance(last, int | float):
        return all(rounds) if isinstance(last, bool) else last
    return round(statistics.median(rounds), 3)


def ratios(results: Results, torch_loop: Mapping[str, float]) -> dict[str, float]:
    """See `MEANINGS`. A server without figures has no ratio."""
    found: dict[str, float] = {}
    for workload, servers in results.items():
        ours = servers.get(OURS)
        if ours is None:
            continue
        for peer, theirs in servers.items():
            if peer != OURS:
                found |= _against(workload, peer, ours, theirs)
        if workload == "model" and torch_loop:
            found |= _against_torch(ours, torch_loop[MAX_ROWS])
    return {name: round(value, 3) for name, value in found.items()}


def _against(workload: str, peer: str, ours: Figures, theirs: Figures) -> dict[str, float]:
    rate, their_rate = ours["requests_per_s"], theirs["requests_per_s"]
    p99, their_p99 = (one["open_loop"]["latency_ms"]["p99"] for one in (ours, theirs))
    open_key = "open_p99" if workload == "model" else f"open_p99_{workload}"
    found = {
        f"{workload}/{peer}": rate[32] / their_rate[32],
        f"{workload}/{peer}@128": rate[128] / their_rate[128],
        f"{open_key}/{peer}": p99 / their_p99,
    }
    if same_rate := theirs.get("halftone_at_its_rate"):
        same_key = "open_p99_same_rate" if workload == "model" else f"open_p99_same_rate_{workload}"
        found[f"{same_key}/{peer}"] = same_rate["latency_ms"]["p99"] / their_p99
    if workload == "echo":
        found[f"p50_alone/{peer}"] = ours["p50_ms"][1] / theirs["p50_ms"][1]
    return found


def _against_torch(ours: Figures, rows_per_s: float) -> dict[str, float]:
    bound_ms = 2 * (1000 * int(MAX_ROWS) / rows_per_s + 2)
    return {
        "model/torch_loop": ours["requests_per_s"][32] / rows_per_s,
        "model/torch_loop@128": ours["requests_per_s"][128] / rows_per_s,
        "model_p99/bound": ours["p99_ms"][32] / bound_ms,
    }


def document(
    results: Results,
    torch_loop: Mapping[str, float],
    failures: Mapping[str, str],
    conditions: Mapping[str, Any],
) -> dict[str, Any]:
    """All that was measured, and under which conditions."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "conditions": dict(conditions),
        "servers": {name: CONTENDERS[name].settings for name in CONTENDERS},
        "versions": {"halftone": versions(None, _OUR_PACKAGES), "peers": versions(PEERS_BIN, _PEER_PACKAGES)},
        "ratios": ratios(results, torch_loop),
        "ratio_meanings": MEANINGS,
        "failures": dict(failures),
        "results": results,
        "torch_loop_rows_per_s": dict(torch_loop),
    }


def versions(bin_folder: Any, packages: Sequence[str]) -> dict[str, str]:
    """Of installed packages, here or in the peers' environment."""
    if bin_folder is None:
        return {package: version(package) for package in packages}
    if not bin_folder.exists():
        return {}
    code = f"from importlib.metadata import version; print(*map(version, {packages!r}))"
    done = subprocess.run(
        [str(bin_folder / "python"), "-c", code], capture_output=True, text=True, check=True
    )
    return dict(zip(packages, done.stdout.split(), strict=True))


def table(found: Mapping[str, Any]) -> str:
    """Markdown: a section per workload, a line per server."""
    lines = []
    for workload, servers in found["results"].items():
        lines += [
            f"**{workload}**",
            "",
            _HEADING,
            "|---|---|---|---|---|---|---|",
        ]
        for name, figures in servers.items():
            lines.append(_line(workload, name, figures, found["ratios"]))
        if workload == "model":
            lines += [
                _torch_line(rows, rate, found["ratios"])
                for rows, rate in found["torch_loop_rows_per_s"].items()
            ]
        lines.append("")
    lines += [
        f"{name}: {reason.splitlines()[0][:_REASON_LENGTH]}" for name, reason in found["failures"].items()
    ]
    return "\n".join(lines)


def _line(workload: str, name: str, figures: Figures, known: Mapping[str, float]) -> str:
    rate, open_loop = figures["requests_per_s"], figures["open_loop"]
    ratio = (
        "" if name == OURS or f"{workload}/{name}" not in known
        else f"{known[f'{workload}/{name}']:.2f} · {known[f'{workload}/{name}@128']:.2f}"
    )  # fmt: skip
    rates = f"{rate[32]:,.0f}/s | {rate[128]:,.0f}/s"
    late = "" if open_loop["kept_up"] else ", generator late or out of connections"
    failed = sum(open_loop["failures"].values())
    late += f", {failed} failed" if failed else ""
    p99_ms = open_loop["latency_ms"]["p99"]
    same_rate = figures.get("halftone_at_its_rate")
    same = f"{same_rate['latency_ms']['p99']:,.1f} ms" if same_rate else ""
    return (
        f"| {CONTENDERS[name].title} | {figures['p50_ms'][1]:.2f} ms | {rates} "
        f"| {ratio} | {open_loop['offered_per_s']:,.0f}/s, {p99_ms:,.1f} ms{late} | {same} |"
    )


def _torch_line(rows: str, rate: float, known: Mapping[str, float]) -> str:
    ratio = ""
    if rows == MAX_ROWS and "model/torch_loop" in known:
        ratio = f"{known['model/torch_loop']:.2f} · {known['model/torch_loop@128']:.2f}"
    return f"| bare torch loop, batches of {rows} | | {rate:,.0f}/s | {rate:,.0f}/s | {ratio} | | |"


def panels(found: Mapping[str, Any]) -> list[Panel]:
    """The README's picture."""
    titles = {"echo": "Echo, 128 FP32 values", "model": "MiniLM, a sentence per request"}
    drawn = []
    for workload, servers in found["results"].items():
        bars = [
            Bar(CONTENDERS[name].title, figures["requests_per_s"][32], name == OURS)
            for name, figures in servers.items()
        ]
        if workload == "model" and found["torch_loop_rows_per_s"]:
            bars.append(Bar("bare torch loop", found["torch_loop_rows_per_s"][MAX_ROWS], is_ours=False))
        drawn.append(Panel(f"{titles[workload]}: requests per second at {CONNECTIONS[1]} connections", bars))
    return drawn
