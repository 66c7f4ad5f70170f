"""A small HTTP client for `halftone serve` itself: asks its own server, as any caller would."""

from __future__ import annotations

import http.client
import json
import shlex
import ssl
from pathlib import Path
from typing import Any

from serving.config import ServerConfig
from serving.errors import HalftoneError
from serving.gateway.auth import load_tokens
from serving.protocol.tls import leaf_certificate, trusting_context

TIMEOUT_S = 60.0


class LocalClient:
    """Calls the server that this process started."""

    def __init__(self, server: ServerConfig) -> None:
        self._host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)  # noqa: S104
        self._port = server.port
        tokens = load_tokens(server.tokens_file) if server.tokens_file else {}
        token = next(iter(tokens.values()), None)
        self._certificate = server.tls_certificate
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    @property
    def url(self) -> str:
        """Where the server answers."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._certificate else 'http'}://{host}:{self._port}"

    @property
    def curl_options(self) -> str:
        """What a `curl` line needs before the URL: empty, or ending in a space."""
        options = """-H "Authorization: Bearer $TOKEN" """ if self._headers else ""
        if self._certificate is None:
            return options
        # --insecure where the certificate is for another name than this address, or has expired.
        is_verified = self._is_verified(self._certificate)
        trust = f"--cacert {shlex.quote(str(self._certificate))}" if is_verified else "--insecure"
        return f"{options}{trust} "

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
        connection = self._connection()
        try:
            self._connect(connection)
            connection.request(method, path, body, {**self._headers, **headers})
            response = connection.getresponse()
            document = json.loads(response.read())
            return response.status, {k.lower(): v for k, v in response.getheaders()}, document
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._certificate is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        # Neither name nor authority is checked: `_connect` wants the very certificate of the file.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        """Before anything is sent, the token not least.

        Raises:
            OSError: nothing listens.
            HalftoneError: something else does than this server.
        """
        connection.connect()
        if self._certificate is None:
            return
        wanted = leaf_certificate(self._certificate)
        if (
            not isinstance(connection.sock, ssl.SSLSocket)
            or connection.sock.getpeercert(binary_form=True) != wanted
        ):
            raise HalftoneError(f"{self.url} answers with another certificate than {self._certificate}")

    def _is_verified(self, certificate: Path) -> bool:
        """Whether a client that trusts the file finds nothing wrong with it at this address."""
        context = trusting_context(certificate)
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError:
            return False
        finally:
            connection.close()
        return True
