"""The baseline of `echo_overhead.py`: Ray Serve as its documentation shows it, ingress -> deployment.

Defaults everywhere. It parses nothing and batches nothing: the body goes through as bytes.
"""

from __future__ import annotations

import sys
import threading

from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Tier:
    """Returns what it is given."""

    async def __call__(self, body: bytes) -> bytes:
        """Echo one request."""
        return body


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
class Ingress:
    """The HTTP side: one call to the tier per request."""

    def __init__(self, tier: serve.handle.DeploymentHandle) -> None:
        self._tier = tier

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        return Response(await self._tier.remote(await request.body()))


def main() -> None:
    """Serve on the given port until standard input closes."""
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Ingress.bind(Tier.bind()))
    print("ready", flush=True)
    reader = threading.Thread(target=sys.stdin.read, daemon=True)
    reader.start()
    reader.join()
    serve.shutdown()


if __name__ == "__main__":
    main()
