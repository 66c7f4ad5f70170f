"""Ray's own ports: on loopback, or closed to whoever has no token of this run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from server_process import ServerProcess, descendants

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
_LISTENS = "0A"
#: Of Serve's replicas, of Ray's node, of its control service: calls that would tell or do something.
CALLS = (
    "/ray.serve.ASGIService/HandleRequest",
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/PushTask",
)
#: No token; or a call that this server does not have, for each has some of them.
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}


@dataclass(frozen=True)
class Listener:
    """A TCP port that a process listens on."""

    port: int
    is_loopback: bool
    command: str


def listeners(server: ServerProcess) -> list[Listener]:
    """Those of the server and of every process below it."""
    owners: dict[str, str] = {}
    for pid in (server.process.pid, *descendants(server.process.pid)):
        try:
            links = [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # It has just ended.
        for link in links:
            if found := re.fullmatch(r"socket:\[(\d+)\]", str(link)):
                owners[found[1]] = command
    found_listeners = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text("ascii").splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == _LISTENS and fields[9] in owners:
                found_listeners.append(Listener(int(port, 16), address in LOOPBACK, owners[fields[9]]))
    return found_listeners


def outcomes(port: int, metadata: tuple[tuple[str, str], ...] = ()) -> set[grpc.StatusCode]:
    """How each of the calls ends on a port."""
    found = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in CALLS:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b"", timeout=20, metadata=metadata)
            found.add(caught.value.code())
    return found


def test_what_listens_beyond_loopback_is_serves_and_wants_the_token(server: ServerProcess) -> None:
    """Serve chooses the address of one port in each replica; nobody gets in there without a token."""
    found = listeners(server)
    assert any(listener.port == server.port for listener in found)
    assert any("gcs_server" in listener.command for listener in found)
    beyond = [listener for listener in found if not listener.is_loopback]
    assert len(beyond) > 0
    for listener in beyond:
        assert "ray::ServeReplica" in listener.command or "halftone:" in listener.command, listener
        assert outcomes(listener.port) == REFUSED
    wrong = (("authorization", "Bearer " + "0" * 64),)
    assert outcomes(beyond[0].port, wrong) == REFUSED


def test_rays_control_service_wants_the_token_too(server: ServerProcess) -> None:
    """On loopback other users of the machine could ask it to run code."""
    control = [listener for listener in listeners(server) if "gcs_server" in listener.command]
    assert all(listener.is_loopback for listener in control)
    assert REFUSED in [outcomes(listener.port) for listener in control]
