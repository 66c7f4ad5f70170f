"""A server that is deployed, and deployed anew with another configuration when its standard input says so."""

from __future__ import annotations

import sys
from pathlib import Path

from serving.config import load_config
from serving.runtime.cluster import local_cluster, reserved_port


def main(*paths: str) -> None:
    """Deploy each configuration in turn, a line of standard input before each but the first."""
    configs = [load_config(Path(path)) for path in paths]
    with reserved_port(configs[0].server), local_cluster(configs[0]):
        from serving.runtime.application import RunningApplication  # noqa: PLC0415  Imports Ray.

        for config in configs:
            RunningApplication(config)
            print("deployed", flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
