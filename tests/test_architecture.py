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
HEAVY = ("torch", "ray", "httptools", "torch_npu")


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


#: What runs, or may run, the text or bytes that it is given.
RUNS_ITS_INPUT = {
    *("eval", "exec", "compile", "__import__"),
    *(
        f"{module}.{name}"
        for module in ("pickle", "_pickle", "marshal", "dill")
        for name in ("load", "loads")
    ),
    *("pickle.Unpickler", "shelve.open", "cloudpickle.load", "cloudpickle.loads"),
    *("os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load", "joblib.load"),
    *("runpy.run_path", "runpy.run_module", "torch.jit.load", "torch.export.load"),
}
#: Loads a program that the operator's configuration names by its hash, after looking for pickles in it.
PROGRAMS = Path("serving/models/programs.py")


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression that is only that; empty otherwise."""
    if isinstance(node, ast.Attribute):
        start = dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return node.id if isinstance(node, ast.Name) else ""


def runs_its_input(code: str) -> list[str]:
    """Calls in a module that may run what they are given, whatever name they were imported under."""
    tree = ast.parse(code)
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = dotted(call.func)
        first, _, rest = name.partition(".")
        name = ".".join(filter(None, (known.get(first, first), rest)))
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        is_unsafe = {
            "torch.load": options.get("weights_only") != "True",
            "numpy.load": options.get("allow_pickle", "False") != "False",
            # The configuration's own loader is a SafeLoader, which its own tests prove.
            "yaml.load": options.get("Loader") not in {"yaml.SafeLoader", "_UniqueKeyLoader"},
        }.get(name, name in RUNS_ITS_INPUT or options.get("shell") == "True")
        if is_unsafe:
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle\npickle.loads(b'')", ["pickle.loads"]),
        ("import pickle as p\np.load(f)", ["pickle.load"]),
        ("from pickle import loads as read\nread(b'')", ["pickle.loads"]),
        ("eval('1')\nexec('1')\ncompile('1', '', 'eval')", ["eval", "exec", "compile"]),
        ("import torch\ntorch.load(f)", ["torch.load"]),
        ("import torch\ntorch.load(f, weights_only=False)", ["torch.load"]),
        ("import torch\ntorch.load(f, weights_only=True)", []),
        ("import torch\ntorch.jit.load(f)", ["torch.jit.load"]),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", ["numpy.load"]),
        ("import numpy as np\nnp.load(f)", []),
        ("import yaml\nyaml.load(f, Loader=yaml.Loader)", ["yaml.load"]),
        ("import yaml\nyaml.load(f, Loader=yaml.SafeLoader)", []),
        ("import subprocess\nsubprocess.run('ls', shell=True)", ["subprocess.run"]),
        ("import re\nre.compile('a')\nmodule.eval()", []),
    ],
)
def test_a_call_that_runs_its_input_is_found(code: str, found: list[str]) -> None:
    """By whatever name it goes."""
    assert runs_its_input(code) == found


def test_nothing_runs_what_it_is_given() -> None:
    """No pickle, no `eval`, no shell; one module loads programs, and looks into them first."""
    found = {
        path.relative_to(ROOT): calls
        for path in (ROOT / "serving").rglob("*.py")
        if (calls := runs_its_input(path.read_text("utf-8")))
    }
    assert found.pop(PROGRAMS) == ["torch.jit.load", "torch.export.load"]
    assert found == {}


#: Beside these no module that a request reaches opens files, so that no client can name one.
OPENS_FILES = {
    "gateway/auth.py": "the operator's tokens",
    "gateway/token_watch.py": "the same",
    "gateway/captures.py": "into the operator's folder, under names of its own",
    "protocol/server.py": "the operator's certificate",
    "protocol/tls.py": "the same",
    "divergence/capture.py": "an operator's, for `halftone replay`",
}


def test_no_module_that_a_request_reaches_opens_files() -> None:
    """But for files that the operator names."""
    found = {
        str(path.relative_to(ROOT / "serving"))
        for folder in ("gateway", "protocol", "routing", "observe", "divergence")
        for path in (ROOT / "serving" / folder).rglob("*.py")
        if {node.id for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Name)}
        & {"Path", "open"}
    }
    assert found == OPENS_FILES.keys()
