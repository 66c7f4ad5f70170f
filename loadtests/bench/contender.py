"""The servers, how each is started, and the settings that each runs with."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtests.bench.workload import (
    BENTOML,
    LITSERVE,
    OIP_BINARY,
    OIP_JSON,
    RAW_MOSEC,
    RAW_RAY,
    Dialect,
    Workload,
)  # fmt: skip
from loadtests.server_process import ROOT, StartFailed, free_port, running, why_not

PEERS_BIN = ROOT / ".venv-peers" / "bin"
_BATCHING = "batches of up to 32 rows, wait of up to 2 ms"

Command = Callable[[int, Path], list[str]]


@dataclass(frozen=True, slots=True)
class Contender:
    """A server in the comparison.

    Attributes:
        title: for people.
        settings: stated beside its figures.
        dialect: its requests and replies.
        command: port and a folder of its own -> what starts it.
        environment: port-independent variables that it is started with.
    """

    title: str
    settings: str
    dialect: Dialect
    command: Command
    environment: Callable[[Path], dict[str, str]] = lambda _: {}
    needs_peers: bool = True


def _halftone(port: int, folder: Path) -> list[str]:
    return [sys.executable, "-m", "serving.cli", "serve", str(folder / "halftone.yaml"), "--port", str(port)]


def _ray_serve(port: int, folder: Path) -> list[str]:
    return [sys.executable, "-m", "loadtests.peers.ray_serve_app", str(port), str(folder / "ray")]


def _peer(module: str, *arguments: str) -> Command:
    python = str(PEERS_BIN / "python")
    return lambda port, folder: [
        python, "-m", f"loadtests.peers.{module}",
        *(argument.format(port=port, folder=folder) for argument in arguments),
    ]  # fmt: skip


def _bentoml(port: int, folder: Path) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(PEERS_BIN / "bentoml"), "serve", "loadtests.peers.bentoml_app:Service", *where]


def _haproxy_environment(folder: Path) -> dict[str, str]:
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "haproxy.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "haproxy-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }


OURS = "halftone"
CONTENDERS: dict[str, Contender] = {
    OURS: Contender(
        "Halftone",
        f"defaults ({_BATCHING}, as round trips allow), one gateway, tier fp32; OIP, binary tensors",
        OIP_BINARY,
        _halftone,
        needs_peers=False,
    ),
    "ray_serve": Contender(
        "Ray Serve",
        f"ingress calls a deployment with @serve.batch, {_BATCHING}; no access log, else defaults; raw bytes",
        RAW_RAY,
        _ray_serve,
        needs_peers=False,
    ),
    "ray_serve_haproxy": Contender(
        "Ray Serve, HAProxy",
        "the same with RAY_SERVE_ENABLE_HA_PROXY=1, RAY_SERVE_THROUGHPUT_OPTIMIZED=1, RAY_worker_niceness=0 "
        "and one HAProxy thread",
        RAW_RAY,
        _ray_serve,
        _haproxy_environment,
        needs_peers=False,
    ),
    "litserve": Contender(
        "LitServe",
        f"max_batch_size and batch_timeout ({_BATCHING}), fast_queue=True, one worker; JSON",
        LITSERVE,
        _peer("litserve_app", "{port}"),
    ),
    "bentoml": Contender(
        "BentoML",
        "batchable API, max_batch_size=32, its adaptive dispatcher instead of a fixed wait, one worker; JSON",
        BENTOML,
        _bentoml,
        lambda folder: {"BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"},
    ),
    "mlserver": Contender(
        "MLServer",
        f"adaptive batching ({_BATCHING}), parallel_workers=0; OIP, JSON",
        OIP_JSON,
        _peer("mlserver_app", "{port}", "{folder}"),
    ),
    "mosec": Contender(
        "Mosec",
        f"max_batch_size and max_wait_time ({_BATCHING}), one worker; raw bytes",
        RAW_MOSEC,
        _peer("mosec_app", "--port", "{port}", "--address", "127.0.0.1", "--log-level", "warning"),
    ),
}


@contextmanager
def started(name: str, workload: Workload, threads: int, folder: Path) -> Iterator[str]:
    """The server, answering; the URL for its requests.

    Raises:
        StartFailed: its environment is missing, or it did not become ready.
    """
    contender = CONTENDERS[name]
    if contender.needs_peers and not PEERS_BIN.exists():
        raise StartFailed(f"{PEERS_BIN.parent.name} is missing: `make bench` sets it up")
    folder.mkdir(parents=True)
    (folder / "halftone.yaml").write_text(workload.config)
    port = free_port()
    environment = {
        "PYTHONPATH": str(ROOT),
        "BENCH_MODEL": workload.peer_model,
        "BENCH_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(folder),
        **contender.environment(folder),
    }
    url = f"http://127.0.0.1:{port}{contender.dialect.path(workload)}"
    body, headers = contender.dialect.encode(workload, workload.rows[0])
    request = urllib.request.Request(url, body, dict(headers))
    with running(contender.command(port, folder), folder / "log", lambda: why_not(request), environment):
        yield url


def ask(name: str, workload: Workload, url: str, row: bytes) -> object:
    """One request's output row."""
    dialect = CONTENDERS[name].dialect
    body, headers = dialect.encode(workload, row)
    with urllib.request.urlopen(urllib.request.Request(url, body, dict(headers)), timeout=30) as reply:  # noqa: S310
        return dialect.decode(reply.read(), {key.lower(): value for key, value in reply.headers.items()})
