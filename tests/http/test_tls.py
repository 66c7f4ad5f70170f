"""HTTPS on a running server: lines that can be pasted, operators, renewed certificates."""

from __future__ import annotations

import http.client
import json
import shlex
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import client
import numpy as np
from certificates import issue
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, Start

CONFIG = """
server: {{tls_certificate: {pair.certificate}, tls_key: {pair.key}}}
models:
  - name: echo
    source: serving.models.echo:Echo
    tiers: {{fp32: {{}}, fp16: {{}}}}
"""
BODY = client.infer_body("x", np.ones((1, 128)))


def call(server: ServerProcess, trusted: Path, method: str, path: str, body: bytes = b"") -> client.Reply:
    """One request over TLS, to a server that must have a certificate of this authority's."""
    context = ssl.create_default_context(cafile=trusted)
    connection = http.client.HTTPSConnection(*server.address, timeout=60, context=context)
    try:
        connection.request(method, path, body or None, {"content-type": "application/json"})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return client.Reply(response.status, headers, response.read())
    finally:
        connection.close()


def test_https(start: Start, tmp_path: Path) -> None:
    """From the first line that it prints to a renewed certificate, and never plain HTTP."""
    pair = issue(tmp_path / "tls", "127.0.0.1")
    config = CONFIG.format(pair=pair)
    server = start(config)
    server.wait_for_output("Try:")
    _plain_http_gets_no_answer(server)
    assert call(server, pair.ca, "POST", "/v2/models/echo/infer", BODY).status == 200
    page = call(server, pair.ca, "GET", "/metrics").body.decode()
    assert any(family.name == "halftone_requests" for family in text_string_to_metric_families(page))
    _what_it_prints_can_be_pasted(server, tmp_path)
    _an_operator_reaches_it(server, pair.ca)
    _tls_cannot_be_switched_off(server, config)
    renewed = issue(tmp_path / "tls", "127.0.0.1")
    _reload(server, config, "Reloaded.")
    assert call(server, renewed.ca, "POST", "/v2/models/echo/infer", BODY).status == 200
    assert server.interrupt() == 0, server.output


def _plain_http_gets_no_answer(server: ServerProcess) -> None:
    """Neither an answer nor a redirect that could be forged."""
    with socket.create_connection(server.address, timeout=20) as plain:
        plain.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: t\r\n\r\n")
        assert b"HTTP/" not in plain.recv(1000)


def _what_it_prints_can_be_pasted(server: ServerProcess, folder: Path) -> None:
    lines = [line.strip() for line in server.output.splitlines() if line.strip().startswith("curl ")]
    assert len(lines) == 4
    for line in lines:
        assert "https://127.0.0.1" in line
        assert "--cacert" in line
    for line in lines[:-1]:
        command, _, file = line.partition(" > ")
        done = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, check=True)
        if file:
            (folder / file).write_bytes(done.stdout)
        else:
            assert done.stdout.startswith(b"HTTP/1.1 200"), done.stdout


def _an_operator_reaches_it(server: ServerProcess, ca: Path) -> None:
    command = [sys.executable, "-m", "serving.cli", "tier", "trip", "echo", "fp16", "--url"]
    command += [f"https://127.0.0.1:{server.port}", "--ca-file", str(ca)]
    assert subprocess.run(command, capture_output=True, check=True).stdout.startswith(b"echo/fp16: trip done")
    state = json.loads(call(server, ca, "GET", "/v2/models/echo/precision").body)
    assert state["tiers"]["fp16"]["state"] == "tripped"


def _tls_cannot_be_switched_off(server: ServerProcess, config: str) -> None:
    plain = "\n".join(line for line in config.splitlines() if not line.startswith("server:"))
    _reload(server, plain, "NOT RELOADED")
    assert "server.tls_certificate: TLS cannot be switched while the server runs" in server.output


def _reload(server: ServerProcess, config: str, said: str) -> None:
    server.config.write_text(config, encoding="utf-8")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_output(said)
