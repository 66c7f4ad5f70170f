"""A configuration that changes while requests come in: nobody notices, or nothing changes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections import Counter
from pathlib import Path

import client
from load import BODY, Load, ready
from server_process import ServerProcess, Start
from wellness import assert_still_well

CONFIG = """
server: {gateways: 1}
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {fp32: {}, fp16: {}}
    default: fp16
"""
PATH = "/v2/models/echo/infer"
CHANGED = CONFIG.replace("fp16: {}}", "fp16: {batching: {max_rows: 8}}, bf16: {}}")


class KeptConnections:
    """Clients that keep their connections for as long as the server does."""

    def __init__(self, server: ServerProcess, clients: int = 4) -> None:
        self.replies: list[int] = []
        #: Connections that ended without having said so: each may cost a client a request.
        self.broken = 0
        self.said_close = 0
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(clients)))

    async def _run(self, clients: int) -> None:
        await asyncio.gather(*(self._ask() for _ in range(clients)))

    async def _ask(self) -> None:
        while not self._over.is_set():
            connection = await client.Connection.open(self._server.address)
            while not self._over.is_set():
                try:
                    reply = await connection.post(PATH, BODY, {})
                except (OSError, asyncio.IncompleteReadError):
                    self.broken += 1
                    break
                self.replies.append(reply.status)
                if reply.headers.get("connection") == "close":
                    self.said_close += 1
                    break
                await asyncio.sleep(0.01)
            with contextlib.suppress(OSError):
                await connection.close()

    def __enter__(self) -> KeptConnections:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def reload(server: ServerProcess, config: str, said: str) -> None:
    """Write the file, send SIGHUP, wait for what the server says."""
    server.config.write_text(config, encoding="utf-8")
    before = server.output.count(said)
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_output(said, times=before + 1)


def tiers(server: ServerProcess) -> set[str]:
    """Those that the model has now."""
    return set(server.call("GET", "/v2/models/echo").json()["tiers"])


def test_a_change_under_load_fails_no_request(start: Start, tmp_path: Path) -> None:
    """With one gateway and one replica of each tier; what was tripped stays tripped."""
    server = start(CONFIG)
    server.wait_for_output("Try:")
    assert server.call("POST", "/v2/models/echo/tiers/fp16/trip").status == 200
    with Load(server) as load, KeptConnections(server) as kept:
        load.wait_for_replies(50)
        reload(server, CHANGED, "Reloaded.")
        load.wait_for_replies(50)
    print(f"{len(load.replies)} new connections, {len(kept.replies)} replies on kept ones", kept.said_close)
    assert Counter(load.replies).keys() == {(200, "")}, Counter(load.replies)
    assert set(kept.replies) == {200}
    assert kept.broken == 0
    assert kept.said_close >= 4
    assert tiers(server) == {"fp32", "fp16", "bf16"}
    assert server.call("POST", PATH, BODY, x_precision="bf16").headers["x-precision-tier"] == "bf16"
    assert server.call("POST", PATH, BODY, x_precision="fp16").headers["x-precision-reason"] == "budget"
    assert server.processes("ray::ServeReplica:halftone:") == []
    _a_wrong_configuration_changes_nothing(server)
    reload(server, CONFIG, "Reloaded.")
    assert tiers(server) == {"fp32", "fp16"}
    assert_still_well(server, PATH, BODY)
    assert server.interrupt() == 0, server.output
    assert server.leftovers() == []


def _a_wrong_configuration_changes_nothing(server: ServerProcess) -> None:
    """A wrong field, another port, a model that does not load: said, and the old one serves on."""
    changes = {
        "fp16: {}": ("fp16: {kind: fp17}", "fp17"),
        "{gateways: 1}": ("{host: 127.0.0.2}", "server.host: cannot change while the server runs"),
        "serving.models.echo:Echo": ("mypackage.faulty:returns_none", "NOT RELOADED"),
        "fp32: {}": ("fp32: {resources: {NPU: 1}}", "and this machine has 0 that is free"),
    }
    processes = sorted(server.processes("ray::ServeReplica"))
    with Load(server) as load:
        for old, (new, said) in changes.items():
            reload(server, CONFIG.replace(old, new), "NOT RELOADED")
            assert said in server.output
    assert Counter(load.replies).keys() == {(200, "")}
    assert sorted(server.processes("ray::ServeReplica")) == processes
    assert ready(server)
