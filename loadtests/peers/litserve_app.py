"""LitServe: JSON in and out, `batch_timeout` and `max_batch_size` on the API.

python -m loadtests.peers.litserve_app PORT
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import litserve

from loadtests.peers import model


class Api(litserve.LitAPI):
    """A row per request, batches as lists."""

    _run: Callable[[Sequence[bytes]], model.Batch]

    def setup(self, device: str) -> None:
        """Load the model in the worker's process."""
        self._run = model.load()

    def decode_request(self, request) -> bytes:  # type: ignore[no-untyped-def]  # noqa: ANN001  LitServe reads it.
        """`{"x": …}` -> a row."""
        return model.row_of(request["x"])

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """Rows stay a list: the model stacks or pads them."""
        return inputs

    def predict(self, x: list[bytes]) -> model.Batch:
        """One batch."""
        return self._run(x)

    def unbatch(self, output: model.Batch) -> list[Any]:
        """Rows as JSON has them."""
        rows: list[Any] = output.tolist()
        return rows

    def encode_response(self, output: Any) -> dict[str, Any]:
        """A row -> `{"y": …}`."""
        return {"y": output}


def main() -> None:
    """Serve on the given port."""
    api = Api(max_batch_size=model.MAX_ROWS, batch_timeout=model.MAX_WAIT_MS / 1000)
    server = litserve.LitServer(api, accelerator="cpu", fast_queue=True)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main()
