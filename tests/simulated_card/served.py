"""The whole server on simulated cards (stub CANN), for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import client
import networks
import numpy as np
import server_process
from card import HERE, SimulatedCard

CARDS, MEMORY_MB = 3, 512
#: Completed by tiers, each a line that is indented by six.
CONFIG = """
models:
  - name: vision
    source: networks:served
    device: npu
    inputs: [{name: x, dtype: FP32, shape: [-1, 3, 16, 16]}]
    outputs:
      - {name: logits, dtype: FP32, shape: [-1, 10], kind: logits}
      - {name: where, dtype: INT64, shape: [-1, 3]}
    default: fp16
    tiers:
"""
PATH = "/v2/models/vision/infer"


@contextmanager
def serving(
    card: SimulatedCard, soc: str, tiers: list[str], folder: Path
) -> Iterator[server_process.ServerProcess]:
    """A ready server that sees `CARDS` cards of a kind."""
    environment = card.environment(soc, cards=CARDS, memory_mb=MEMORY_MB)
    config = CONFIG + "".join(f"      {tier}\n" for tier in tiers)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment["PYTHONPATH"]])
    environment[networks.TRIGGER] = str(folder / "trigger")
    with server_process.ready_server(folder, config, environment) as server:
        yield server


def ask(server: server_process.ServerProcess, x: np.ndarray, tier: str = "fp16") -> client.Reply:
    """One request."""
    return server.call("POST", PATH, client.infer_body("x", x), x_precision=tier)


def where(reply: client.Reply) -> tuple[int, int, int]:
    """The card that a replica sees, how many it sees, and its process."""
    output = next(output for output in reply.json()["outputs"] if output["name"] == "where")
    visible, count, process = output["data"][:3]
    return visible, count, process
