"""What live comparison costs those who are not compared: `python -m loadtests.shadow_cost`.

One server has the embedded text model three times, with none, 5 % and all of the FP16 tier's rows in
the sample. Each is put to two tests, by turns, round after round, so that a busy machine disturbs all alike:

- *Saturated reference*: callers keep the FP32 tier busy while others use the FP16 tier. Sampled rows find
  no idle replica and are dropped; the FP32 callers' latencies are compared with those of no sample.
- *FP16 throughput*: the FP16 tier alone is kept busy, the reference is free to compute what is sampled.
  With one machine for all, the reference's work takes cores from the tier, which on cards it would not.

Prints medians over rounds and their ratios to no sample; results go to `loadtests/results/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from loadtests.result_file import conditions, keep
from loadtests.server_process import halftone

SAMPLES = {"none": 0.0, "some": 0.05, "all": 1.0}
REFERENCE_CALLERS, FP16_CALLERS = 4, 2
SENTENCE = "Sampled rows wait until a replica of the reference is idle, or are dropped."
_MODEL = """
  - name: {name}
    source: serving.models.minilm:MiniLM
    tiers: {{fp32: {{threads: 1}}, fp16: {{threads: 1}}}}
    divergence: {{sample: {sample}, budget: 1.0, shadow: {{max_age_s: 1}}}}
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One test of one model in one round."""

    model: str
    test: str
    #: Of the callers that the test is about.
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    #: What became of sampled rows meanwhile.
    compared: float
    dropped: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each test and model (default 5)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each (default 6)")
    options = parser.parse_args()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        models = (_MODEL.format(name=name, sample=sample) for name, sample in SAMPLES.items())
        config.write_text("models:" + "".join(models), encoding="utf-8")
        with halftone(config, Path(folder) / "log", {}) as (url, _):
            for name in SAMPLES:
                asyncio.run(_load(url, name, "fp32", 2, 2.0))  # Warm.
            for turn in range(options.rounds):
                # Every round begins with another model: none is always the first to find the machine warm.
                order = [*SAMPLES][turn % 3 :] + [*SAMPLES][: turn % 3]
                for test in ("saturated reference", "fp16 throughput"):
                    runs += [_measure(url, name, test, options.seconds) for name in order]
    summary = _summary(runs)
    for line in summary:
        print("  ".join(f"{key} {value}" for key, value in line.items()))
    document = {
        **conditions(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "callers": {"fp32": REFERENCE_CALLERS, "fp16": FP16_CALLERS},
        "summary": summary,
        "runs": [asdict(run) for run in runs],
    }
    keep("shadow-cost", document)


def _measure(url: str, name: str, test: str, seconds: float) -> Run:
    before = _outcomes(url, name)
    latencies_s = asyncio.run(_run_test(url, name, test, seconds))
    time.sleep(1.5)  # Rows that waited have their outcome, and two beats have passed.
    after = _outcomes(url, name)
    latencies_s.sort()
    return Run(
        name,
        test,
        round(len(latencies_s) / seconds, 1),
        round(1000 * latencies_s[len(latencies_s) // 2], 2),
        round(1000 * latencies_s[int(0.99 * len(latencies_s))], 2),
        after["compared"] - before["compared"],
        after["dropped"] - before["dropped"],
    )


async def _run_test(url: str, name: str, test: str, seconds: float) -> list[float]:
    if test == "fp16 throughput":
        return await _load(url, name, "fp16", REFERENCE_CALLERS, seconds)
    reference, _ = await asyncio.gather(
        _load(url, name, "fp32", REFERENCE_CALLERS, seconds), _load(url, name, "fp16", FP16_CALLERS, seconds)
    )
    return reference


async def _load(url: str, name: str, tier: str, callers: int, seconds: float) -> list[float]:
    """Callers that ask one request after another. Returns every latency, in seconds."""
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [SENTENCE]}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        f"x-precision: {tier}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    parts = await asyncio.gather(*[_caller(url, head.encode() + body, seconds) for _ in range(callers)])
    return [latency_s for part in parts for latency_s in part]


async def _caller(url: str, request: bytes, seconds: float) -> list[float]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    latencies_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while (sent_s := time.perf_counter()) < end_s:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(f"refused: {head.splitlines()[0]}")
        length = next(line for line in head.splitlines() if line.startswith("content-length:"))
        await reader.readexactly(int(length.partition(":")[2]))
        latencies_s.append(time.perf_counter() - sent_s)
    writer.close()
    await writer.wait_closed()
    return latencies_s


def _outcomes(url: str, name: str) -> dict[str, float]:
    """Sampled rows of a model, by what became of them."""
    found = {"compared": 0.0, "dropped": 0.0, "failed": 0.0}
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:  # noqa: S310  Our own loopback URL.
        for line in page.read().decode().splitlines():
            if line.startswith("halftone_shadow_rows_total") and f'model="{name}"' in line:
                outcome = line.split('outcome="')[1].split('"')[0]
                found[outcome] += float(line.rpartition(" ")[2])
    return found


def _summary(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Medians over rounds, and of the ratios to the same round without a sample."""
    lines: list[dict[str, object]] = []
    for test in ("saturated reference", "fp16 throughput"):
        plain = [run for run in runs if (run.test, run.model) == (test, "none")]
        for name, sample in SAMPLES.items():
            own = [run for run in runs if (run.test, run.model) == (test, name)]
            pairs = list(zip(own, plain, strict=True))
            line: dict[str, object] = {"test": test, "sample": sample}
            for field in ("requests_per_s", "p50_ms", "p99_ms"):
                line[field] = statistics.median(getattr(run, field) for run in own)
                ratios = [getattr(run, field) / getattr(base, field) for run, base in pairs]
                line[f"{field}_ratio"] = round(statistics.median(ratios), 3)
            line["compared"] = sum(run.compared for run in own)
            line["dropped"] = sum(run.dropped for run in own)
            lines.append(line)
    return lines


if __name__ == "__main__":
    main()
