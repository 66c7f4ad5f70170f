"""What the README tells a newcomer to write works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", README, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with every file that the README shows."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("config", ["classifier.yaml", "letters.yaml"])
def test_the_shown_configurations_pass_the_check(folder: Path, config: str) -> None:
    """`halftone check` in the folder of the files, sources imported."""
    command = [sys.executable, "-m", "serving.cli", "check", config]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_every_configuration_shipped_passes_the_check() -> None:
    """Those of `deployments/` too."""
    for config in sorted((ROOT / "deployments").glob("*.yaml")):
        command = [sys.executable, "-m", "serving.cli", "check", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_file_that_it_links_to_exists() -> None:
    """No dead relative link."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_make_target_that_it_names_exists() -> None:
    """`make X` in the README is a target."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE)) <= targets
