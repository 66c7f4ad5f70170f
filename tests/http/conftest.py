"""One server for the tests that only ask it something: four models, nine tiers, two gateways."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# The load generators and this folder's helpers are no packages.
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE / "models")]

from server_process import ServerProcess, Start, ready_server  # noqa: E402  Beside this file.

CONFIG = """
server: {gateways: 2, max_body_bytes: 4194304, body_timeout_s: 2}
models:
  - name: text
    source: serving.models.minilm:MiniLM
    tiers: {fp32: {}, fp16: {}, mixed: {}}
    default: standard
    classes: {critical: fp32, standard: fp16, edge: fp16, bulk: {tier: fp16}}
  - name: vision
    source: serving.models.efficientnet:EfficientNetLite0
    tiers: {fp32: {}, fp16: {}}
  - name: echo
    source: serving.models.echo:Echo
    tiers:
      fp32: {max_queue_rows: 4096}
      fp16: {max_queue_rows: 4096}
    default: bulk
    classes: {critical: fp32, bulk: fp16}
  - name: classifier
    source: mypackage.module:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 128]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 10], kind: logits}]
    tiers: {fp32: {}, fp16: {}}
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A ready server."""
    with ready_server(tmp_path_factory.mktemp("server"), CONFIG) as process:
        yield process


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers, and sees to it that none outlives the test."""
    started: list[ServerProcess] = []

    def run(config: str, port: int | None = None, temporary: Path | None = None) -> ServerProcess:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(ServerProcess(folder, config, port, temporary=temporary))
        return started[-1]

    yield run
    for server in started:
        server.kill()
