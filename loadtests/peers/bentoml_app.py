"""BentoML: a batchable API over arrays or texts.

    bentoml serve loadtests.peers.bentoml_app:Service --port PORT

BentoML has no fixed wait: its dispatcher estimates from past batches whether waiting pays, within
`max_latency_ms`, beyond which a request is refused; here far above what the benchmark reaches.
"""

from __future__ import annotations

import bentoml
import numpy as np

from loadtests.peers import model

_MAX_LATENCY_MS = 60_000


@bentoml.service(workers=1, traffic={"timeout": 60, "max_concurrency": 4096})
class Service:
    """Both models; each benchmark calls its own."""

    def __init__(self) -> None:
        self._run = model.load()

    @bentoml.api(batchable=True, max_batch_size=model.MAX_ROWS, max_latency_ms=_MAX_LATENCY_MS)
    def echo(self, x: np.ndarray) -> np.ndarray:
        """x: [rows, 128] of numbers."""
        return self._run([row.tobytes() for row in x.astype(np.float32)])

    @bentoml.api(batchable=True, max_batch_size=model.MAX_ROWS, max_latency_ms=_MAX_LATENCY_MS)
    def text(self, x: list[str]) -> np.ndarray:
        """x: texts."""
        return self._run([text.encode() for text in x])
