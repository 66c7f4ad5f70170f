"""The import rules: pyproject's contracts, and what is really in memory after an import."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import serving.gateway

ROOT = Path(__file__).parent.parent
GATEWAY_MODULES = [
    f"serving.gateway.{module.name}" for module in pkgutil.iter_modules(serving.gateway.__path__)
]
HEAVY = ("torch", "ray", "granian", "torch_npu")


def loaded_by(module: str) -> list[str]:
    """Which heavy packages a fresh process holds once it has imported a module."""
    code = f"import json, sys; import {module}; print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded: list[str] = json.loads(done.stdout)
    return loaded


def test_the_import_contracts_hold() -> None:
    """What `make check` runs."""
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("module", GATEWAY_MODULES)
def test_a_gateway_module_imports_neither_torch_nor_ray(module: str) -> None:
    """A gateway process stays small and starts quickly."""
    assert loaded_by(module) == []


@pytest.mark.parametrize("module", ["serving.cli", "serving.models.echo", "serving.models.minilm"])
def test_the_command_and_the_sources_start_light(module: str) -> None:
    """`halftone check` needs no torch; gateways import sources for their preprocessing."""
    assert loaded_by(module) == []
