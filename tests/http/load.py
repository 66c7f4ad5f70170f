"""Clients that keep asking while a test breaks something, and waiting until it has healed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import client
import numpy as np
from server_process import ServerProcess

HEAL_TIMEOUT_S = 240.0
BODY = client.infer_body("x", np.ones((1, 128)))


class Load:
    """Clients that ask one after another until they are told to stop; every reply is kept."""

    def __init__(
        self, server: ServerProcess, model: str = "echo", clients: int = 4, body: bytes = BODY
    ) -> None:
        #: Status and code of every reply; status 0 and the error's name where there was none.
        self.replies: list[tuple[int, str]] = []
        #: Seconds that each reply took.
        self.took_s: list[float] = []
        self._server, self._path, self._body = server, f"/v2/models/{model}/infer", body
        self._stop = threading.Event()
        self._began_s = time.monotonic()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def _ask(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                reply = self._server.call("POST", self._path, self._body)
            except OSError as error:
                self.replies.append((0, type(error).__name__))
                time.sleep(0.05)
            else:
                code = "" if reply.status == 200 else reply.json()["code"]
                if code and (reply.status, code) not in self.replies:
                    print(f"after {time.monotonic() - self._began_s:.1f} s:", reply.json()["error"])
                self.replies.append((reply.status, code))
            self.took_s.append(time.monotonic() - began_s)

    def wait_for_replies(self, count: int) -> None:
        """Wait until that many more have come."""
        wanted = len(self.replies) + count
        wait_until(lambda: len(self.replies) >= wanted)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def wait_until(condition: Callable[[], bool], timeout_s: float = HEAL_TIMEOUT_S) -> float:
    """Seconds until the condition holds."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, "it did not heal"
        time.sleep(0.1)
    return time.monotonic() - started_s


def ready(server: ServerProcess) -> bool:
    """Whether `/v2/health/ready` says so."""
    try:
        return server.call("GET", "/v2/health/ready").status == 200
    except OSError:
        return False
