"""`halftone tier` against a small server that keeps what it is sent."""

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from certificates import issue

from serving.cli import main
from serving.errors import ConfigError, HalftoneError
from serving.runtime.tier_command import set_tier


class Operator(HTTPServer):
    """Answers as it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.answer: bytes = b'{"model": "m"}'
        #: Path, body and headers.
        self.requests: list[tuple[str, bytes, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Operator

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, body, headers))
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def operator() -> Iterator[Operator]:
    """A running server."""
    with Operator() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_it_posts_to_the_tier_s_route(operator: Operator, tmp_path: Path) -> None:
    """With the reason and the first token."""
    tokens = tmp_path / "tokens"
    tokens.write_text("alice first-token-0123456789\nbob second-token-0123456789\n")
    set_tier("trip", "text", "fp16", url=operator.url + "/", tokens_file=tokens, reason="new driver")
    ((path, body, headers),) = operator.requests
    assert path == "/v2/models/text/tiers/fp16/trip"
    assert json.loads(body) == {"reason": "new driver"}
    assert headers["authorization"] == "Bearer first-token-0123456789"
    set_tier("reset", "text", "fp16", url=operator.url)
    path, body, headers = operator.requests[1]
    assert (path, body) == ("/v2/models/text/tiers/fp16/reset", b"")
    assert "authorization" not in headers


def test_names_cannot_leave_their_place_in_the_path(operator: Operator) -> None:
    """They are escaped."""
    set_tier("trip", "../x", "a/b?c#d", url=operator.url)
    assert operator.requests[0][0] == "/v2/models/..%2Fx/tiers/a%2Fb%3Fc%23d/trip"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://[::1",
        "http://h:99999",
        "http://h:x",
        "http://h/v2",
    ],
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    """With an example of one."""
    with pytest.raises(ConfigError, match="is no URL such as http"):
        set_tier("trip", "m", "fp16", url=url)


def test_a_refusal_is_told_in_the_server_s_words(operator: Operator) -> None:
    """Or by its status."""
    operator.status, operator.answer = 401, b'{"error": "a token is needed", "code": "unauthorized"}'
    with pytest.raises(HalftoneError, match="the server refused: a token is needed"):
        set_tier("trip", "m", "fp16", url=operator.url)
    operator.status, operator.answer = 500, b"[]"
    with pytest.raises(HalftoneError, match="the server refused: 500"):
        set_tier("trip", "m", "fp16", url=operator.url)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"\xff"])
def test_another_server_is_recognised(operator: Operator, answer: bytes) -> None:
    """By an answer that is no JSON."""
    operator.answer = answer
    with pytest.raises(HalftoneError, match="does not answer as a Halftone server"):
        set_tier("trip", "m", "fp16", url=operator.url)


def test_a_server_that_is_not_there(operator: Operator) -> None:
    """Says so."""
    url = operator.url.replace(str(operator.server_port), "1")
    with pytest.raises(HalftoneError, match="does not answer"):
        set_tier("trip", "m", "fp16", url=url)


def test_https(operator: Operator, tmp_path: Path) -> None:
    """With the authority's file, or the server's own certificate; without either it is not trusted."""
    pair = issue(tmp_path / "tls", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    operator.socket = context.wrap_socket(operator.socket, server_side=True)
    url = operator.url.replace("http:", "https:")
    for trusted in (pair.ca, pair.certificate):
        set_tier("trip", "m", "fp16", url=url, ca_file=trusted)
    assert len(operator.requests) == 2
    with pytest.raises(HalftoneError, match="CERTIFICATE_VERIFY_FAILED"):
        set_tier("trip", "m", "fp16", url=url)
    with pytest.raises(HalftoneError, match="Hostname mismatch"):
        set_tier("trip", "m", "fp16", url=url.replace("127.0.0.1", "localhost"), ca_file=pair.ca)
    assert len(operator.requests) == 2


@pytest.mark.parametrize(
    ("url", "file", "words"),
    [
        ("https://127.0.0.1:1", "gone", "cannot read certificates from"),
        ("https://127.0.0.1:1", "\0", "cannot read certificates from"),
        ("https://127.0.0.1:1", "empty", "cannot read certificates from"),
        ("http://127.0.0.1:1", "empty", "is for https"),
    ],
)
def test_authorities_that_are_none(url: str, file: str, words: str, tmp_path: Path) -> None:
    """A mistake of whoever types it, found before anything is sent."""
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=words):
        set_tier("trip", "m", "fp16", url=url, ca_file=tmp_path / file)


def test_the_command(operator: Operator, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit status 0, 1 where the server refused, 2 where the input is bad."""
    assert main(["tier", "trip", "text", "fp16", "--url", operator.url, "--reason", "x"]) == 0
    assert "text/fp16: trip done" in capsys.readouterr().out
    operator.status = 404
    assert main(["tier", "reset", "text", "fp16", "--url", operator.url]) == 1
    assert "the server refused" in capsys.readouterr().err
    assert main(["tier", "trip", "text", "fp16", "--url", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("halftone: 'nowhere' is no URL")
    missing = str(tmp_path / "absent")
    assert main(["tier", "trip", "text", "fp16", "--url", operator.url, "--tokens-file", missing]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["tier", "explode", "text", "fp16"])
    assert caught.value.code == 2
