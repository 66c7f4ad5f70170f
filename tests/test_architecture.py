"""The import rules: pyproject's contracts, and what is really in memory after an import."""

import ast
import json
import pkgutil
import subprocess
import sys
from collections import Counter
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


def named_twice(code: str) -> list[str]:
    """Constants that a module gives a value more than once: the first has none any more."""
    names: list[str] = []
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Assign):
            names += [target.id for target in statement.targets if isinstance(target, ast.Name)]
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.append(statement.target.id)
    return [name for name, times in Counter(names).items() if times > 1]


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


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("A_S = 2.0\nB_S = 3.0\n", []),
        ("A_S = 2.0\nA_S = 15.0\n", ["A_S"]),
        ("A_S = 2.0\nA_S: float = 15.0\n", ["A_S"]),
    ],
)
def test_a_name_given_twice_is_found(code: str, found: list[str]) -> None:
    """However it is written."""
    assert named_twice(code) == found


def test_no_constant_is_given_twice() -> None:
    """Two limits under one name are one limit, and it is not the one that was meant."""
    modules = [
        path for folder in ("serving", "deployments", "loadtests") for path in (ROOT / folder).rglob("*.py")
    ]
    assert modules
    assert {
        str(path.relative_to(ROOT)): names
        for path in modules
        if (names := named_twice(path.read_text("utf-8")))
    } == {}
