"""`/openapi.json` held against its server by schemathesis, which sends what it allows and what it forbids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess, ready_server

CONFIG = """
server: {max_body_bytes: 1048576}
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp32: {}, fp16: {}}
    default: bulk
    classes: {critical: fp32, bulk: fp16}
  - name: unbuildable
    source: mypackage.faulty:raises
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {}}
"""
#: A path's model is fixed, so that each run is about one; tiers are those that can be tripped.
RULES = """
color = false
continue-on-failure = true
warnings = false
request-timeout = 20.0

[generation]
max-examples = {examples}
database = "none"
deterministic = true

[phases.stateful]
enabled = false

[parameters]
"path.model" = "{model}"
"path.tier" = "fp16"

[checks]
# A document cannot tell which server asks for tokens, and this one does not.
ignored_auth.enabled = false
{checks}

# No schema can say that `data` has as many elements as `shape` makes; a deadline may be no time at all.
[[operations]]
include-path = "/v2/models/{{model}}/infer"
checks.positive_data_acceptance.enabled = false
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 504]

# Processes have names that no document can know.
[[operations]]
include-path = "/metrics/processes/{{process}}"
checks.positive_data_acceptance.enabled = false

# It stays 503: one of the two models cannot be built.
[[operations]]
include-path = "/v2/health/ready"
checks.not_a_server_error.enabled = false
checks.positive_data_acceptance.enabled = false
"""
Explore = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of which one model works and the other cannot be built."""
    with ready_server(tmp_path_factory.mktemp("halves"), CONFIG) as process:
        yield process


@pytest.fixture
def explore(halves: ServerProcess, tmp_path: Path) -> Explore:
    """Runs schemathesis with a document, the server's own where none is given."""

    def explore(
        model: str, checks: str = "", *options: str, document: Any = None, examples: int = 25
    ) -> subprocess.CompletedProcess[str]:
        described = document or halves.call("GET", "/openapi.json").json()
        (tmp_path / "openapi.json").write_text(json.dumps(described))
        rules = RULES.format(model=model, checks=checks, examples=examples)
        (tmp_path / "schemathesis.toml").write_text(rules)
        url = f"http://127.0.0.1:{halves.port}"
        command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", url, *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return explore


def test_a_model_that_works_answers_as_documented(explore: Explore) -> None:
    """Statuses, media types, headers, bodies; nothing that was generated is answered with 5xx."""
    done = explore("echo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tested: 17" in done.stdout


def test_a_model_that_does_not_load_answers_as_documented(explore: Explore) -> None:
    """503 where the document says so, never an undocumented status."""
    checks = "not_a_server_error.enabled = false\npositive_data_acceptance.enabled = false"
    done = explore("unbuildable", checks, examples=10)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tested: 17" in done.stdout


def forget_a_status(document: Any) -> None:
    """A model that cannot be built is not ready."""
    del document["paths"]["/v2/models/{model}/ready"]["get"]["responses"]["503"]


def promise_a_field(document: Any) -> None:
    """That no reply has."""
    document["components"]["schemas"]["Error"]["required"].append("trace")


def promise_a_reply(document: Any) -> None:
    """With a field that the answer to a good request lacks."""
    document["components"]["schemas"]["InferResponse"]["required"].append("elapsed")


def promise_another_type(document: Any) -> None:
    """Metrics are no JSON."""
    content = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    content["application/json"] = content.pop("text/plain")


FLAWS = {
    "status": (forget_a_status, "unbuildable", "/v2/models/{model}/ready", "Undocumented status code"),
    "error": (promise_a_field, "echo", "/v2/models/{model}/infer", "Response violates schema"),
    "reply": (promise_a_reply, "echo", "/v2/models/{model}/infer", "Response violates schema"),
    "media": (promise_another_type, "echo", "/metrics", "Undocumented Content-Type"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_document_that_is_wrong_is_found_out(halves: ServerProcess, explore: Explore, flaw: str) -> None:
    """The checks do check: each is shown a document that does not fit."""
    spoil, model, path, finding = FLAWS[flaw]
    document = halves.call("GET", "/openapi.json").json()
    spoil(document)
    checks = "not_a_server_error.enabled = false\npositive_data_acceptance.enabled = false"
    options = ("--include-path", path, "--phases", "examples,coverage", "--max-failures", "1", "--no-shrink")
    done = explore(model, checks, *options, document=document)
    assert done.returncode == 1, done.stdout + done.stderr
    assert finding in done.stdout, done.stdout
