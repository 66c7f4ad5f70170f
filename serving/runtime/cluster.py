"""A Ray cluster of this process's own: started for one `halftone serve`, gone without a trace after it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.config import Config, ServerConfig
from serving.errors import ConfigError, HalftoneError
from serving.runtime.private_folder import private_folder
from serving.runtime.ray_watch import ray_watched
from serving.runtime.tier_plan import plan_tiers
from serving.runtime.worker_output import forward_output

logger = logging.getLogger("halftone")

#: Ray's shared-memory store. Batches travel in calls; only what is large goes through it.
OBJECT_STORE_BYTES = 256 * 2**20

_ENVIRONMENT = {
    # Ray starts its workers at nice 15, which wrecks the tail of latencies on a busy host.
    "RAY_worker_niceness": "0",
    # What Serve's throughput mode sets, but for direct ingress, which would start a proxy and
    # take 30 s to stop: user code, router and replica share one event loop, calls go over gRPC.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # gRPC's own limit is 4 MiB, less than one large row: bodies are bounded where they come in.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Off, Ray takes 127.0.0.1 for the address of this node (on Linux too) and its servers
    # listen there only; on, it would look up the address that other machines see.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A card's package, where one is installed and not asked for, must not load with torch.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class PortTaken(HalftoneError):
    """Something listens on the configured port already."""


@contextmanager
def reserved_port(server: ServerConfig) -> Iterator[None]:
    """Hold the port for this run: gateways share it, strangers and a second run do not get in.

    The gateways bind with SO_REUSEPORT, and so would a second run's: both would take
    connections in turn. A bind without that option sees the port as taken.

    Raises:
        PortTaken: another process has the port, or the address is not this machine's.
    """
    family, _, _, _, address = _address(server)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PortTaken(f"cannot listen on {server.host}:{server.port}: {reason}") from error
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        # Bound but not listening: it gets no connection, and keeps a second run out.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind(address)
        except OSError as error:
            raise PortTaken(f"cannot listen on {server.host}:{server.port}: {error.strerror}") from error
        yield


def _address(server: ServerConfig) -> tuple[int, int, int, str, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PortTaken(f"cannot listen on {server.host}: {error.strerror}") from error
    except ValueError as error:  # A name that no resolver takes: NUL, or an empty label.
        raise PortTaken(f"cannot listen on {server.host!r}: not a host name") from error
    return found[0]  # type: ignore[return-value]  # Stream sockets only.


@contextmanager
def local_cluster(config: Config) -> Iterator[None]:
    """A Ray cluster with a token of its own, in a folder that is removed after it.

    It listens on loopback, but for the gRPC port that Serve opens in each replica on every
    address; that one asks for the token too.

    Raises:
        ConfigError: a tier asks for resources that this machine does not have.
    """
    _prepare_environment()
    with private_folder() as folder, _compiler_cache(folder / "compiled"):
        import ray  # noqa: PLC0415  Reads its environment when imported.

        try:
            ray.init(
                include_dashboard=False,
                # Ray opens its folder to everybody; within ours nobody else gets there.
                _temp_dir=str(folder / "ray"),
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=True,
                logging_level=logging.WARNING,
            )
        except Exception as error:  # Where its own start takes too long it raises just that.
            raise HalftoneError(f"Ray could not be started: {_first_line(error)}") from error
        try:
            forward_output(config.server.log)
            _check_resources(config, ray.cluster_resources())
            with ray_watched(ray._private.worker._global_node, folder):  # noqa: SLF001  No other way.
                yield
        finally:
            ray.shutdown()


@contextmanager
def _compiler_cache(folder: Path) -> Iterator[None]:
    """Have torch keep what it compiles in this run's folder, unless the operator has a place for it.

    It makes the folder as soon as a dispatch mode is used, and would leave it.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(folder)
    try:
        yield
    finally:
        del os.environ[name]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _prepare_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Every Ray port, the replicas' gRPC ports included, wants the token of this run. Whatever
    # the environment says of another cluster must neither lift that nor lead there.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
        os.environ.pop(name, None)
    # A proxy for the outside must not stand between processes of one machine.
    for name in ("no_proxy", "NO_PROXY"):
        known = [entry for entry in os.environ.get(name, "").split(",") if entry]
        os.environ[name] = ",".join(dict.fromkeys([*known, *_LOOPBACK]))
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # Replicas import the model's module from where this process would.
    paths = [path for path in sys.path if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def check_free_resources(config: Config) -> None:
    """Refuse a configuration that does not fit beside what runs.

    Raises:
        ConfigError: its tiers ask for more than is free.
    """
    import ray  # noqa: PLC0415  Reads its environment when imported.

    _check_resources(config, ray.available_resources(), "that is free")


def _check_resources(config: Config, available: dict[str, float], which: str = "") -> None:
    """Refuse what would wait for ever.

    Raises:
        ConfigError: the replicas of all tiers together ask for more than the cluster has.
    """
    wanted: dict[str, float] = {}
    for plan in plan_tiers(config):
        for name, amount in plan.resources.items():
            wanted[name] = wanted.get(name, 0.0) + amount * plan.config.replicas
    for name, amount in wanted.items():
        if amount > available.get(name, 0.0):
            raise ConfigError(
                f"the tiers ask for {name}: {amount:g} in all, "
                f"and this machine has {' '.join((f'{available.get(name, 0.0):g}', which)).strip()}"
            )
