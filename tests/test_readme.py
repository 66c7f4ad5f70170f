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
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
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


def blocks(text: str) -> list[str]:
    """Its code blocks, without comments, which are translated."""
    found = re.findall(r"^(?:<!-- file: \S+ -->\n)?```.*?^```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s*# .*", "", block) for block in found]


def code_spans(text: str) -> set[str]:
    """What stands in backticks outside of code blocks, each once."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", outside))


def test_the_chinese_readme_has_the_same_commands() -> None:
    """And the same files, configurations and outputs."""
    assert blocks(CHINESE) == blocks(README)


def test_the_chinese_readme_names_the_same_things() -> None:
    """Headers, keys, routes, files; links; sections; rows of tables."""
    assert code_spans(CHINESE) == code_spans(README)
    links = [re.findall(r"\]\(([^)]+)\)", text) for text in (CHINESE, README)]
    assert sorted(set(links[0]) - {"README.md"}) == sorted(set(links[1]) - {"README.zh-CN.md"})
    for start in ("#", "|"):
        counts = [sum(line.startswith(start) for line in text.splitlines()) for text in (CHINESE, README)]
        assert counts[0] == counts[1], start
