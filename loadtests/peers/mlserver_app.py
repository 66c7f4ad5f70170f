"""MLServer: the Open Inference Protocol in JSON, with adaptive batching from `model-settings.json`.

`python -m loadtests.peers.mlserver_app PORT FOLDER` writes the settings and starts `mlserver start FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

from loadtests.peers import model

#: Inference in the server's own process; a pool of workers would pickle each batch across.
SETTINGS = {
    "host": "127.0.0.1",
    "parallel_workers": 0,
    "debug": False,
    "metrics_port": 0,
    "grpc_port": 0,
}


class Runtime(MLModel):
    """The model."""

    async def load(self) -> bool:
        """Load it."""
        self._run = model.load()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """One batch, merged by MLServer along the first dimension."""
        given = payload.inputs[0]
        values = getattr(given.data, "root", given.data)
        count = given.shape[0]
        if given.datatype == "BYTES":
            rows = [text if isinstance(text, bytes) else text.encode() for text in values]
        else:
            rows = [row.tobytes() for row in np.array(values, dtype=np.float32).reshape(count, -1)]
        y = self._run(rows)  # y: [rows, features]
        output = ResponseOutput(name="y", shape=list(y.shape), datatype="FP32", data=y.ravel().tolist())
        return InferenceResponse(model_name=self.name, outputs=[output])


def main() -> None:
    """Write the settings and become MLServer."""
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    batching = {"max_batch_size": model.MAX_ROWS, "max_batch_time": model.MAX_WAIT_MS / 1000}
    settings = {"name": model.NAME, "implementation": "loadtests.peers.mlserver_app.Runtime", **batching}
    (folder / "settings.json").write_text(json.dumps({**SETTINGS, "http_port": port}))
    (folder / "model-settings.json").write_text(json.dumps(settings))
    mlserver = str(Path(sys.executable).parent / "mlserver")
    os.execv(mlserver, [mlserver, "start", str(folder)])  # noqa: S606


if __name__ == "__main__":
    main()
