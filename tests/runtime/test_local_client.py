"""The server's client of its own: where it asks, what it sends, and to whom it does not send a token."""

import json
import shlex
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from certificates import Pair, issue

from serving.config import ServerConfig
from serving.errors import HalftoneError
from serving.runtime.local_client import LocalClient

TOKEN = "0123456789abcdef"  # noqa: S105  A test's.


class Listener(HTTPServer):
    """Says what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        #: Their `Authorization`.
        self.requests: list[str | None] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away during the handshake."""

    def speak_tls(self, pair: Pair) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        self.socket = context.wrap_socket(self.socket, server_side=True)


class _Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        self.server.requests.append(self.headers.get("authorization"))
        body = json.dumps({"path": self.path}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """No lines."""


@pytest.fixture
def listener() -> Iterator[Listener]:
    """It serves until the test ends."""
    with Listener() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def configured(listener: Listener, pair: Pair | None = None, **server: object) -> ServerConfig:
    """The configuration of a server at that port."""
    tls = {} if pair is None else {"tls_certificate": pair.certificate, "tls_key": pair.key}
    return ServerConfig.model_validate({"port": listener.server_port, **tls, **server})


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("box", "box")],  # noqa: S104
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_where_it_asks(host: str, url: str, scheme: str, tmp_path: Path) -> None:
    """On this machine, where the server listens everywhere."""
    pair = issue(tmp_path / "tls", "box")
    tls = {"tls_certificate": pair.certificate, "tls_key": pair.key} if scheme == "https" else {}
    server = ServerConfig.model_validate({"host": host, "port": 1, "allow_unauthenticated": True, **tls})
    assert LocalClient(server).url == f"{scheme}://{url}:1"


def test_it_sends_the_first_token(listener: Listener, tmp_path: Path) -> None:
    """And tells whoever pastes a line to send one."""
    (tmp_path / "tokens").write_text(f"alice {TOKEN}\n")
    client = LocalClient(configured(listener, tokens_file=tmp_path / "tokens"))
    assert client.get("/v2") == (200, {"path": "/v2"})
    assert listener.requests == [f"Bearer {TOKEN}"]
    assert client.curl_options == '-H "Authorization: Bearer $TOKEN" '
    assert LocalClient(configured(listener)).curl_options == ""


@pytest.mark.parametrize(
    ("names", "option"), [(("127.0.0.1",), "--cacert"), (("halftone.test",), "--insecure")]
)
def test_over_tls(listener: Listener, tmp_path: Path, names: tuple[str, ...], option: str) -> None:
    """Whatever name the certificate has; the line to paste works as it stands."""
    pair = issue(tmp_path / "a folder", *names)
    listener.speak_tls(pair)
    client = LocalClient(configured(listener, pair))
    assert client.get("/v2") == (200, {"path": "/v2"})
    assert client.curl_options.startswith(option)
    pasted = shlex.split(f"curl -s {client.curl_options}{client.url}/pasted")
    said = subprocess.run(pasted, capture_output=True, check=True)
    assert json.loads(said.stdout) == {"path": "/pasted"}


def test_no_token_goes_to_another_server(listener: Listener, tmp_path: Path) -> None:
    """One with another certificate gets no request, whatever names that has."""
    (tmp_path / "tokens").write_text(f"alice {TOKEN}\n")
    listener.speak_tls(issue(tmp_path / "other", "127.0.0.1"))
    own = issue(tmp_path / "own", "127.0.0.1")
    client = LocalClient(configured(listener, own, tokens_file=tmp_path / "tokens"))
    with pytest.raises(HalftoneError, match="another certificate"):
        client.get("/v2")
    assert listener.requests == []


def test_a_renewed_certificate_is_its_own(listener: Listener, tmp_path: Path) -> None:
    """The file counts as it is now."""
    client = LocalClient(configured(listener, issue(tmp_path / "tls", "127.0.0.1")))
    listener.speak_tls(issue(tmp_path / "tls", "127.0.0.1"))
    assert client.get("/v2")[0] == 200


def test_nobody_there_is_an_os_error(tmp_path: Path) -> None:
    """Which means: ask again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pair = issue(tmp_path / "tls", "127.0.0.1")
    for tls in ({}, {"tls_certificate": pair.certificate, "tls_key": pair.key}):
        with pytest.raises(OSError, match="refused"):
            LocalClient(ServerConfig.model_validate({"port": port, **tls})).problems()
