"""Models delivered as files of a program, served: no line of Python of theirs, FP32 and FP16."""

from __future__ import annotations

import hashlib
from pathlib import Path

import client
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from server_process import ready_server
from torch import nn

MODEL = """
  - name: {name}
    source: serving.models.programs:{source}
    weights: {path}
    sha256: {sha256}
    inputs:  [{{name: x, dtype: FP32, shape: [-1, 64]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, 8], kind: logits}}]
    tiers: {{fp32: {{}}, fp16: {{}}}}
"""

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # torch's own, when it saves a tree specification.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def network() -> nn.Module:
    """With fixed weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    return layers.eval().requires_grad_(False)


def test_program_files_are_served_at_both_precisions(tmp_path: Path) -> None:
    """FP32 is the eager model's answer, FP16 what half precision makes of it; each says what it is."""
    module = network()
    x = torch.rand(5, 64, generator=torch.Generator().manual_seed(1))  # [rows, values]
    torch.jit.save(torch.jit.trace(module, x), tmp_path / "model.ts")
    rows = {"input": {0: torch.export.Dim("rows")}}
    program = torch.export.export(module, (x,), dynamic_shapes=rows)
    torch.export.save(program, tmp_path / "model.pt2")
    kinds = {"traced": ("TorchScript", "model.ts"), "exported": ("ExportedProgram", "model.pt2")}
    config = "models:" + "".join(
        MODEL.format(
            name=name,
            source=source,
            path=tmp_path / file,
            sha256=hashlib.sha256((tmp_path / file).read_bytes()).hexdigest(),
        )
        for name, (source, file) in kinds.items()
    )
    wanted = module(x).numpy()
    folder = tmp_path / "server"
    folder.mkdir()
    with ready_server(folder, config) as server:
        for name in kinds:
            path, body = f"/v2/models/{name}/infer", client.infer_body("x", x.numpy())
            fp32 = server.call("POST", path, body, x_precision="fp32")
            fp16 = server.call("POST", path, body, x_precision="fp16")
            assert (fp32.status, fp16.status) == (200, 200), fp16.body
            assert fp32.headers["x-precision-effective"] == "fp32-ieee"
            assert fp16.headers["x-precision-effective"] == "fp16-emulated"
            np.testing.assert_allclose(fp32.array("y"), wanted, rtol=1e-5, atol=1e-6)
            distance = np.linalg.norm(fp16.array("y") - wanted) / np.linalg.norm(wanted)
            assert 1e-5 < distance < 3e-3
        page = server.call("GET", "/metrics").body.decode()
        assert list(text_string_to_metric_families(page))
