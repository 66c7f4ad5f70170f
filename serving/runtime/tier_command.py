"""`halftone tier`: an operator takes a tier out of service on a running server, or puts it back."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from serving.errors import ConfigError, HalftoneError
from serving.gateway.auth import load_tokens
from serving.protocol.tls import trusting_context

TIMEOUT_S = 10.0


def set_tier(
    action: str,
    model: str,
    tier: str,
    *,
    url: str,
    tokens_file: Path | None = None,
    ca_file: Path | None = None,
    reason: str | None = None,
) -> None:
    """Trip or reset a tier.

    Args:
        action: `trip` or `reset`.
        model: its model's name.
        tier: its name.
        url: where the server answers.
        tokens_file: the server's own; its first token is used.
        ca_file: PEM; trusted instead of the system's authorities, by https URLs.
        reason: for logs and other operators.

    Raises:
        ConfigError: the URL, the tokens file or the authorities' file is none.
        HalftoneError: the server refused, or does not answer.
    """
    path = f"/v2/models/{quote(model, safe='')}/tiers/{quote(tier, safe='')}/{action}"
    body = b"" if reason is None else json.dumps({"reason": reason}).encode()
    status, document = _post(_connection(url, ca_file), url, path, body, tokens_file)
    if status != http.client.OK:
        raise HalftoneError(f"the server refused: {document.get('error', status)}")


def _connection(url: str, ca_file: Path | None) -> http.client.HTTPConnection:
    """Not connected yet."""
    scheme, host, port = _server_of(url)
    if scheme == "http":
        if ca_file is not None:
            raise ConfigError(f"{ca_file} is for https, and {url} is not")
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        context = trusting_context(ca_file) if ca_file else ssl.create_default_context()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path.
        raise ConfigError(f"cannot read certificates from {ca_file}: {error}") from error
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


def _post(
    connection: http.client.HTTPConnection, url: str, path: str, body: bytes, tokens_file: Path | None
) -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json"}
    if tokens_file is not None:
        headers["authorization"] = f"Bearer {next(iter(load_tokens(tokens_file).values()))}"
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        document = json.loads(response.read())
        return response.status, document if isinstance(document, dict) else {}
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise HalftoneError(f"{url} does not answer as a Halftone server: {error}") from error
    finally:
        connection.close()


def _server_of(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # Half an IPv6 address, or a port out of range.
        host = None
    if not host or parts.scheme not in {"http", "https"} or parts.path not in {"", "/"}:
        raise ConfigError(f"{url!r} is no URL such as http://127.0.0.1:8000")
    return parts.scheme, host, port
