"""Rows of several megabytes: reported, sent and answered like any other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from server_process import ready_server

VALUES = 1_200_000
CONFIG = f"""
models:
  - name: wide
    source: torch.nn:Identity
    inputs:  [{{name: x, dtype: FP32, shape: [-1, {VALUES}]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1, {VALUES}]}}]
    tiers: {{fp32: {{batching: {{max_rows: 2}}}}}}
"""


def test_rows_beyond_grpcs_own_limit(tmp_path: Path) -> None:
    """The tier's examples, which a gateway is told, are as large."""
    sent = np.linspace(0, 1, VALUES, dtype=np.float32)[None]
    with ready_server(tmp_path, CONFIG) as server:
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": "x",
                        "shape": [1, VALUES],
                        "datatype": "FP32",
                        "parameters": {"binary_data_size": sent.nbytes},
                    }
                ],
                "parameters": {"binary_data_output": True},
            }
        ).encode()
        reply = server.call(
            "POST",
            "/v2/models/wide/infer",
            head + sent.tobytes(),
            content_type="application/octet-stream",
            inference_header_content_length=str(len(head)),
        )
        assert reply.status == 200
        assert reply.body.endswith(sent.tobytes())
