"""The Dockerfile and what obeys it where there is no Docker engine, as far as that needs no root."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "deployments" / "dockerfile_check"))

from builder import IGNORED, Builder, ignored, instructions  # noqa: E402  Beside the repository's own packages.
from root import Stage  # noqa: E402

DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
RULES = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]


def arguments(name: str) -> list[str]:
    """Of every such instruction."""
    return [rest for found, rest in instructions(DOCKERFILE) if found == name]


def test_every_instruction_is_obeyed_or_known_to_do_nothing() -> None:
    """A new one would otherwise pass unseen."""
    for name, _ in instructions(DOCKERFILE):
        assert name in IGNORED or hasattr(Builder, f"_{name.lower()}"), name


def test_lines_are_joined_and_comments_dropped() -> None:
    """Also a comment between two lines of one instruction."""
    text = "# syntax\nARG A=1\nRUN one \\\n # why\n && two\n\nENV X=1 \\\n    Y=2\n"
    found = [(name, rest.split()) for name, rest in instructions(text)]
    assert found == [("ARG", ["A=1"]), ("RUN", ["one", "&&", "two"]), ("ENV", ["X=1", "Y=2"])]


def test_variables_are_replaced() -> None:
    """In both spellings; an unknown one is empty."""
    stage = Stage(Path("/"), variables={"A": "1"}, environment={"PATH": "/bin"})
    assert stage.expanded("/opt/$A:${PATH}:${B}x") == "/opt/1:/bin:x"


@pytest.mark.parametrize(
    "path", ["serving/cli.py", "requirements/runtime.lock", "deployments/local.yaml", "pyproject.toml"]
)
def test_what_the_image_needs_reaches_the_builder(path: str) -> None:
    """And is there."""
    assert (ROOT / path).is_file()
    assert not ignored(Path(path), RULES)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "build/simulated-card/lib.made",
        "tests/conftest.py",
        "serving/__pycache__/cli.cpython-311.pyc",
        "deployments/dockerfile_check/root.py",
        "tokens.txt",
    ],
)
def test_nothing_else_does(path: str) -> None:
    """No history, no tests, no secrets that lie about."""
    assert ignored(Path(path), RULES)


def test_everything_that_is_copied_exists() -> None:
    """In the repository, or made by the stage before."""
    for rest in arguments("COPY"):
        *sources, _ = rest.split()
        if not sources[0].startswith("--from="):
            assert all((ROOT / source).exists() for source in sources), rest


def test_the_image_runs_as_a_user_on_the_port_of_its_configuration() -> None:
    """Exposed, checked and configured: one port. The last user is not root."""
    config = yaml.safe_load((ROOT / "deployments" / "ascend.yaml").read_text("utf-8"))
    port = config["server"]["port"]
    assert arguments("EXPOSE") == [str(port)]
    assert f"http://127.0.0.1:{port}/v2/health/live" in arguments("HEALTHCHECK")[0]
    assert arguments("USER")[-1].isdigit()
    assert int(arguments("USER")[-1]) > 0
    assert arguments("CMD") == ['["serve", "/etc/halftone/ascend.yaml"]']


def test_packages_come_by_hash() -> None:
    """But for torch itself, whose build the index decides, and what is built here."""
    installs = [part for rest in arguments("RUN") for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 5
    for install in installs:
        assert "--require-hashes" in install or "torch.lock" in install or install.rstrip().endswith(" ."), (
            install
        )
