"""Mosec: a Rust front and one worker that takes and gives raw bytes.

python -m loadtests.peers.mosec_app --port PORT --address 127.0.0.1
"""

from __future__ import annotations

import mosec

from loadtests.peers import model


class Worker(mosec.Worker):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self._run = model.load()

    def deserialize(self, data: bytes) -> bytes:
        """A row, of Mosec's own buffer."""
        return bytes(data)

    def serialize(self, data: bytes) -> bytes:
        """An output as it is sent."""
        return data

    def forward(self, data: list[bytes]) -> list[bytes]:
        """One batch."""
        return [output.tobytes() for output in self._run(data)]


def main() -> None:
    """Serve; Mosec reads the command line itself."""
    server = mosec.Server()
    server.append_worker(Worker, num=1, max_batch_size=model.MAX_ROWS, max_wait_time=int(model.MAX_WAIT_MS))
    server.run()


if __name__ == "__main__":
    main()
