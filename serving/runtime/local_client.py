"""A small HTTP client for `halftone serve` itself: asks its own server, as any caller would."""

from __future__ import annotations

import http.client
import json
from typing import Any

from serving.config import ServerConfig
from serving.gateway.auth import load_tokens

TIMEOUT_S = 60.0


class LocalClient:
    """Calls the server that this process started."""

    def __init__(self, server: ServerConfig) -> None:
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # noqa: S104
        self._port = server.port
        tokens = load_tokens(server.tokens_file) if server.tokens_file else {}
        token = next(iter(tokens.values()), None)
        self.needs_token = token is not None
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    @property
    def url(self) -> str:
        """Where the server answers."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded JSON body of a GET."""
        status, _, document = self._call("GET", path, None, {})
        return status, document

    def infer(self, model: str, body: Any, precision: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and decoded JSON body of one inference."""
        payload = json.dumps(body).encode()
        headers = {"content-type": "application/json", "x-precision": precision}
        return self._call("POST", f"/v2/models/{model}/infer", payload, headers)

    def problems(self) -> dict[str, str]:
        """`model/tier` -> why it does not answer; empty when everything is ready."""
        _, _, models = self._call("POST", "/v2/repository/index", b"", {})
        return {
            f"{model['name']}/{tier}": problem
            for model in models
            for tier, problem in model["problems"].items()
        }

    def _call(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, {**self._headers, **headers})
            response = connection.getresponse()
            document = json.loads(response.read())
            return response.status, {k.lower(): v for k, v in response.getheaders()}, document
        finally:
            connection.close()
