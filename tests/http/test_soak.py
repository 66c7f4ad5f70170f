"""The soak test catches a model that leaks, and lets one pass that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from server_process import MODELS

from loadtests.server_process import ROOT

CONFIG = """
models:
  - name: echo
    source: {source}
    tiers: {{fp32: {{}}, fp16: {{}}}}
    default: bulk
    classes: {{critical: fp32, bulk: fp16}}
"""


def soak(folder: Path, source: str) -> tuple[int, Any]:
    """Exit status and report of a run of half a minute."""
    config = folder / "soak.yaml"
    config.write_text(CONFIG.format(source=source))
    command = [sys.executable, "-m", "loadtests.soak", "--minutes", "0.5", "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(MODELS)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_leak_of_each_kind_is_caught(tmp_path: Path) -> None:
    """Memory and descriptors in a tier, tasks in the gateway."""
    status, found = soak(tmp_path, "mypackage.leaking:Leaking")
    growing = {(one["process"].split()[0], one["figure"]) for one in found["growth"] if one["grows"]}
    assert status == 1
    assert {
        ("halftone:echo:fp16", "resident_mib"),
        ("halftone:echo:fp16", "descriptors"),
        ("halftone:gateway", "tasks"),
    } <= growing, found["growth"]


def test_a_model_that_leaks_nothing_passes(tmp_path: Path) -> None:
    """The same load, and every process is watched."""
    status, found = soak(tmp_path, "loadtests.growth.task_count:Watched")
    assert (status, found["problems"]) == (0, [])
    watched = {(one["process"].split()[0], one["figure"]) for one in found["growth"]}
    names = {"halftone:gateway", "halftone:hub", "halftone:echo:fp32", "halftone:echo:fp16", "halftone"}
    assert {name for name, _ in watched} == names
    assert ("halftone:gateway", "tasks") in watched
    assert set(found["replies"]) == {"200", "400"}
