"""What must hold after anything bad: the next good request succeeds, and `/metrics` can be read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess


def assert_still_well(server: ServerProcess, path: str, body: bytes, **headers: str) -> None:
    """A good request to `path` is answered with 200, and the page parses and holds the requests' counter."""
    reply = server.call("POST", path, body, **headers)
    assert reply.status == 200, reply.body[:500]
    page = server.call("GET", "/metrics")
    assert page.status == 200, page.body[:500]
    families = {family.name for family in text_string_to_metric_families(page.body.decode())}
    assert "halftone_requests" in families
