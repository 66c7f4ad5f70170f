"""Start a server with a weights file that is damaged in some way, and show what it says of it.

Usage: python tests/faults/corrupt_weights.py truncated

The file is made in a temporary folder, for the classifier of the tests, and damaged: `truncated`, `flipped`
(a bit, while the configuration has the good file's sha256), `pickled` (a pickle that would write a file, were
it ever loaded), `renamed` (a tensor of another name), `huge` (a header that claims 2^60 bytes), `missing`; or
it is left `good`. The server should be live, not ready, say why, and end well.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http" / "models"))

from mypackage import module

MODELS = Path(__file__).resolve().parents[1] / "http" / "models"

DAMAGES = ("good", "truncated", "flipped", "pickled", "renamed", "huge", "missing")
START_TIMEOUT_S = 180.0
CONFIG = """
models:
  - name: classifier
    source: mypackage.module:build
    weights: {weights}
    sha256: {sha256}
    inputs: [{{name: x, dtype: FP32, shape: [-1, 128]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 10], kind: logits}}]
    tiers: {{fp32: {{}}}}
"""


class Trap:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def main() -> int:
    """Damage, start, ask. Returns 0 when the server took the file as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("damage", choices=DAMAGES)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights, trace = folder / "weights.safetensors", folder / "was-unpickled"
        save_file(module.build().state_dict(), weights)
        if options.damage != "flipped":
            damage(weights, options.damage, trace)
        sha256 = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else "0" * 64
        if options.damage == "flipped":
            damage(weights, options.damage, trace)
        config = folder / "classifier.yaml"
        config.write_text(CONFIG.format(weights=weights, sha256=sha256))
        status, answer = started(config, options.port)
        print(f"/v2/health/ready: {status} {answer}")
        print(f"unpickled: {'YES' if trace.exists() else 'no'}")
        expected = 200 if options.damage == "good" else 503
        return 0 if status == expected and not trace.exists() else 1


def damage(weights: Path, kind: str, trace: Path) -> None:
    """What the name says, to the file."""
    good = weights.read_bytes()
    if kind == "truncated":
        weights.write_bytes(good[: len(good) // 2])
    elif kind == "flipped":
        weights.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])
    elif kind == "pickled":
        weights.write_bytes(pickle.dumps(Trap(trace)))
    elif kind == "renamed":
        tensors = load_file(weights)
        name = next(iter(tensors))
        save_file(
            {f"{key}.old" if key == name else key: torch.clone(tensors[key]) for key in tensors}, weights
        )
    elif kind == "huge":
        weights.write_bytes(struct.pack("<Q", 2**60) + good[8:])
    elif kind == "missing":
        weights.unlink()


def started(config: Path, port: int) -> tuple[int, str]:
    """Start a server, and what it says at `/v2/health/ready` once it has made up its mind; 0: it ended."""
    log = config.with_suffix(".log")
    command = [sys.executable, "-m", "serving.cli", "serve", str(config), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(MODELS), "TMPDIR": str(config.parent)}
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while "Try:" not in log.read_text() and time.monotonic() < give_up_s:
            if server.poll() is not None:
                return 0, log.read_text().strip()
            time.sleep(0.2)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/v2/health/ready")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
            server.wait(60)


if __name__ == "__main__":
    sys.exit(main())
