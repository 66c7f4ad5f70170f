"""Ray Serve as its documentation shows it: an ingress that calls a deployment, which batches dynamically.

    python -m loadtests.peers.ray_serve_app PORT FOLDER

Serves until its standard input closes, on a cluster of its own. Bodies are a row's bytes, replies its
output's.
"""

from __future__ import annotations

import logging
import sys

import ray
from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response

from loadtests.peers import model

# Serve writes a line per request to a file unless told otherwise.
_QUIET = LoggingConfig(enable_access_log=False)


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}, logging_config=_QUIET)
class Tier:
    """The model."""

    def __init__(self) -> None:
        self._run = model.load()

    @serve.batch(max_batch_size=model.MAX_ROWS, batch_wait_timeout_s=model.MAX_WAIT_MS / 1000)
    async def __call__(self, rows: list[bytes]) -> list[bytes]:
        """One batch."""
        return [output.tobytes() for output in self._run(rows)]


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}, logging_config=_QUIET)
class Ingress:
    """The HTTP side: one call to the tier per request."""

    def __init__(self, tier: serve.handle.DeploymentHandle) -> None:
        self._tier = tier

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        return Response(await self._tier.remote(await request.body()))


def main() -> None:
    """Serve on the given port until standard input closes."""
    ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING, _temp_dir=sys.argv[2])
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Ingress.bind(Tier.bind()))
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
