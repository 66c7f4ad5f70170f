"""What every measurement keeps: its figures, when and on what machine, in `loadtests/results/`."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

from loadtests.server_process import ROOT

RESULTS = ROOT / "loadtests" / "results"


def conditions() -> dict[str, Any]:
    """When and where, with the load average so far."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": os.getloadavg(),
    }


def machine() -> dict[str, Any]:
    """What it runs on."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  No path of ours.
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def keep(name: str, document: Mapping[str, Any]) -> str:
    """Write `NAME-<date>.json`, in place of one of the same day. Returns the file's name."""
    target = RESULTS / f"{name}-{dt.datetime.now(dt.UTC).date().isoformat()}.json"
    target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return target.name
