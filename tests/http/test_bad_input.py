"""Bad input on a running server: the documented error, in the one shape, and nothing lost after it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import socket
import time
from pathlib import Path

import client
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess
from wellness import assert_still_well

ECHO = "/v2/models/echo/infer"
ROW = [0.5] * 128


def body(**changes: object) -> bytes:
    """A good body with changes to its one tensor."""
    tensor = {"name": "x", "shape": [1, 128], "datatype": "FP32", "data": ROW, **changes}
    return json.dumps({"inputs": [{k: v for k, v in tensor.items() if v is not None}]}).encode()


GOOD = body()


def binary(rows: np.ndarray) -> tuple[bytes, dict[str, str]]:
    """A body of the binary extension, and its headers."""
    sizes = {"parameters": {"binary_data_size": rows.nbytes}}
    tensor = {"name": "x", "shape": list(rows.shape), "datatype": "FP32", **sizes}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference_header_content_length": str(len(head)), "content_type": "application/octet-stream"}
    return head + rows.tobytes(), headers


TWICE = json.dumps({"inputs": 2 * json.loads(GOOD)["inputs"]}).encode()

CASES = [
    ("empty", b" ", {}, 400, "bad_json"),
    ("not JSON", b"{]", {}, 400, "bad_json"),
    ("not UTF-8", b'{"inputs":"\xff"}', {}, 400, "bad_json"),
    ("lone surrogate", GOOD.replace(b'"x"', b'"\\ud800"'), {}, 400, "bad_json"),
    ("array", b"[]", {}, 400, "bad_json"),
    ("too deep", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400, "too_deep"),
    ("NaN", GOOD.replace(b"0.5", b"NaN", 1), {}, 400, "nonfinite_input"),
    ("1e999", GOOD.replace(b"0.5", b"1e999", 1), {}, 400, "nonfinite_input"),
    ("1e39", GOOD.replace(b"0.5", b"1e39", 1), {}, 400, "nonfinite_input"),
    ("NaN in binary", *binary(np.full((1, 128), np.nan, np.float32)), 400, "nonfinite_input"),
    ("infinity in binary", *binary(np.full((1, 128), np.inf, np.float32)), 400, "nonfinite_input"),
    ("lone surrogate in a parameter", GOOD[:-1] + b',"parameters":{"a":"\\udfff"}}', {}, 400, "bad_json"),
    ("lone surrogate in the id", GOOD[:-1] + b',"id":"\\ud800"}', {}, 400, "bad_json"),
    ("bool", GOOD.replace(b"0.5", b"true", 1), {}, 400, "bad_type"),
    ("string", GOOD.replace(b"0.5", b'"0.5"', 1), {}, 400, "bad_type"),
    ("other dtype", body(datatype="FP64"), {}, 400, "bad_type"),
    ("unknown dtype", body(datatype="FP8"), {}, 400, "bad_type"),
    ("too few values", body(data=ROW[1:]), {}, 400, "bad_shape"),
    ("negative shape", body(shape=[-1, 128]), {}, 400, "bad_shape"),
    ("huge shape", body(shape=[2**62, 128]), {}, 400, "bad_shape"),
    ("other rank", body(shape=[128]), {}, 400, "bad_shape"),
    ("no rows", body(shape=[0, 128], data=[]), {}, 400, "bad_shape"),
    ("missing tensor", b'{"inputs":[]}', {}, 400, "bad_tensor"),
    ("unknown tensor", body(name="z"), {}, 400, "bad_tensor"),
    ("tensor given twice", TWICE, {}, 400, "bad_tensor"),
    ("unknown tier", GOOD, {"x_precision": "fp8"}, 400, "bad_precision"),
    ("empty precision", GOOD, {"x_precision": " "}, 400, "bad_precision"),
    ("tolerance", GOOD, {"x_precision": "rel_l2<=0"}, 400, "bad_precision"),
    ("verify", GOOD, {"x_precision_verify": "perhaps"}, 400, "bad_precision"),
    ("precision as a number", GOOD[:-1] + b',"parameters":{"precision":1}}', {}, 400, "bad_precision"),
    ("bad timeout", GOOD, {"x_request_timeout_seconds": "soon"}, 400, "bad_header"),
    ("bad timeout parameter", GOOD[:-1] + b',"parameters":{"timeout":-1}}', {}, 400, "bad_header"),
    ("header length", GOOD, {"inference_header_content_length": "99999999"}, 400, "bad_header"),
    ("header length, no number", GOOD, {"inference_header_content_length": "-1"}, 400, "bad_header"),
    ("content type", GOOD, {"content_type": "text/plain"}, 415, "unsupported_media_type"),
    ("content encoding", GOOD, {"content_encoding": "br"}, 415, "unsupported_media_type"),
    ("broken gzip", GOOD, {"content_encoding": "gzip"}, 400, "bad_json"),
    ("gzip bomb", gzip.compress(b" " * 8_000_000), {"content_encoding": "gzip"}, 413, "too_large"),
    ("body over the limit", b" " * 4_200_000, {}, 413, "too_large"),
    ("too many rows", body(shape=[5000, 128], data=[1] * 640_000), {}, 413, "too_large"),
]


def assert_error(reply: client.Reply, status: int, code: str) -> None:
    """The status, the code, and the one shape of every error."""
    assert (reply.status, reply.json()["code"]) == (status, code), reply.body[:500]
    assert set(reply.json()) == {"error", "code", "id"}
    assert reply.json()["id"] == reply.headers["x-request-id"]
    assert reply.headers["content-type"] == "application/json"
    assert "Traceback" not in reply.json()["error"]


def still_well(server: ServerProcess) -> None:
    """The next good request succeeds, and `/metrics` parses."""
    assert_still_well(server, ECHO, GOOD)


@pytest.mark.parametrize(
    ("payload", "headers", "status", "code"), [pytest.param(*case[1:], id=case[0]) for case in CASES]
)
def test_bad_requests_are_refused_clearly(
    server: ServerProcess, payload: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    """Each case of the error table that concerns parsing, naming, shapes and sizes."""
    reply = server.call("POST", ECHO, payload, **headers)
    assert_error(reply, status, code)
    if code == "bad_precision" and "x_precision_verify" not in headers:
        assert all(name in reply.json()["error"] for name in ("fp32", "fp16", "critical", "bulk"))
    still_well(server)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v2/models/nobody/infer", 404, "unknown_model"),
        ("POST", "/v2/models/..%2f..%2fetc/infer", 404, "unknown_route"),
        ("POST", "/v2/models/../infer", 404, "unknown_model"),
        ("POST", "/v2/models/echo/versions/2/infer", 404, "unknown_model"),
        ("GET", "/nowhere", 404, "unknown_route"),
        ("GET", ECHO, 405, "method_not_allowed"),
        ("DELETE", "/v2/models/echo", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
    ],
)
def test_wrong_names_routes_and_methods(
    server: ServerProcess, method: str, path: str, status: int, code: str
) -> None:
    """404 and 405, in JSON."""
    assert_error(server.call(method, path, GOOD if method == "POST" else b""), status, code)
    still_well(server)


def raw(server: ServerProcess, request: bytes) -> bytes:
    """What the server answers to raw bytes, until it closes."""
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def test_a_repeated_precision_is_refused(server: ServerProcess) -> None:
    """Two `X-Precision` headers contradict or repeat: 400 either way."""
    head = f"POST {ECHO} HTTP/1.1\r\nhost: t\r\ncontent-length: {len(GOOD)}\r\nconnection: close\r\n"
    request = (head + "x-precision: fp32\r\nx-precision: fp32\r\n\r\n").encode() + GOOD
    answer = raw(server, request)
    assert b" 400 " in answer.split(b"\r\n")[0]
    assert b'"bad_precision"' in answer
    assert b"valid: fp32, fp16, critical, bulk" in answer
    still_well(server)


def test_a_body_that_stays_away_ends_at_its_timeout(server: ServerProcess) -> None:
    """A slow body is answered with 408 at `body_timeout_s`, here 2 s."""
    head = f"POST {ECHO} HTTP/1.1\r\nhost: t\r\ncontent-length: 1000\r\n\r\n"
    started_s = time.monotonic()
    answer = raw(server, head.encode() + b"{")
    assert b'"body_timeout"' in answer
    assert b"connection: close\r\n" in answer  # Its client would lose what it sends next.
    assert 1.5 < time.monotonic() - started_s < 10
    still_well(server)


def test_a_chunked_body_over_the_limit_is_cut_off(server: ServerProcess) -> None:
    """The limit counts what arrives, not what is announced."""
    head = f"POST {ECHO} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(head)
        try:
            for _ in range(100):
                connection.sendall(chunk)
        except OSError:
            connection.close()  # Cut off before everything was sent, as it should be.
            still_well(server)
            return
        assert b'"too_large"' in connection.recv(65536)
    still_well(server)


def resident_bytes(pid: int) -> int:
    """Of a process, now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_body_in_one_byte_chunks_is_cut_off(server: ServerProcess) -> None:
    """3 MB of them: refused long before they are all there, and gateways hold no more than they did."""
    head = f"POST {ECHO} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    gateways = server.processes("halftone:gateway")
    before = [resident_bytes(pid) for pid in gateways]
    with socket.create_connection(server.address, timeout=20) as connection, contextlib.suppress(OSError):
        connection.sendall(head)
        for _ in range(3000):
            connection.sendall(b"1\r\n \r\n" * 1000)
    for pid, resident in zip(gateways, before, strict=True):
        assert resident_bytes(pid) - resident < 64 * 2**20
    page = server.call("GET", "/metrics").body.decode()
    assert 'reason="too_large"' in page
    still_well(server)


def test_hostile_names_make_no_series(server: ServerProcess) -> None:
    """Ten thousand names, ids and header values that clients invent neither fail the page nor grow it."""

    def series() -> set[tuple[str, frozenset[tuple[str, str]]]]:
        page = server.call("GET", "/metrics").body.decode()
        return {
            (sample.name, frozenset(sample.labels.items()))
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    async def hostile_requests(numbers: range) -> None:
        connection = await client.Connection.open(server.address)
        for n in numbers:
            hostile = {"x-precision": f'p{n}"}} 1', "x-request-id": f"id-{n}", "traceparent": f"t{n}"}
            await connection.post(f"/v2/models/model-{n}%0a%22/infer", GOOD, hostile)
            await connection.post(ECHO, GOOD, hostile)
        await connection.close()

    for _ in range(4):  # Connections, so that both gateways have some.
        asyncio.run(hostile_requests(range(20)))
    time.sleep(1)  # Both gateways' beats: what they have counted so far is on the page.
    before = series()
    asyncio.run(hostile_requests(range(20, 5020)))
    assert series() == before
    still_well(server)


@pytest.mark.parametrize("given", ["a" * 129, "caf\xe9", "tab\tbed", "\x7f", ""])
def test_a_request_id_that_is_no_plain_text_is_replaced(server: ServerProcess, given: str) -> None:
    """Too long, not ASCII, not printable: it would stand in logs and headers."""
    head = f"GET /nowhere HTTP/1.1\r\nhost: t\r\nconnection: close\r\nx-request-id: {given}\r\n\r\n"
    reply_head, _, reply_body = raw(server, head.encode("latin-1")).partition(b"\r\n\r\n")
    found = json.loads(reply_body)["id"]
    assert found != given
    assert found.isascii()
    assert found.isprintable()
    assert f"x-request-id: {found}".encode() in reply_head
    still_well(server)


def test_request_ids_are_echoed_or_made(server: ServerProcess) -> None:
    """A given id comes back, in errors too; a body's own id counts; else one is made."""
    assert server.call("GET", "/v2", x_request_id="abc-1").headers["x-request-id"] == "abc-1"
    assert server.call("GET", "/nowhere", x_request_id="abc-2").json()["id"] == "abc-2"
    with_id = GOOD[:-1] + b',"id":"body-3"}'
    reply = server.call("POST", ECHO, with_id)
    assert reply.headers["x-request-id"] == reply.json()["id"] == "body-3"
    made = {server.call("GET", "/v2").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3


def test_a_deadline_ends_a_waiting_request(server: ServerProcess) -> None:
    """A request that cannot be answered in its time gets 504, by header or by parameter."""
    rows = [[f"Sentence {n} of many, so that the tier is busy for a while."] for n in range(400)]
    big = client.text_body([row[0] for row in rows])
    reply = server.call("POST", "/v2/models/text/infer", big, x_request_timeout_seconds="0.05")
    assert_error(reply, 504, "deadline")
    with_timeout = big[:-1] + b', "parameters": {"timeout": 50000}}'
    assert_error(server.call("POST", "/v2/models/text/infer", with_timeout), 504, "deadline")
    still_well(server)


def test_rows_of_a_large_request_come_back_in_order(server: ServerProcess) -> None:
    """A request larger than a batch is split and joined."""
    x = np.arange(100 * 128, dtype=np.float32).reshape(100, 128)
    reply = server.call("POST", ECHO, client.infer_body("x", x), x_precision="fp32")
    assert np.array_equal(reply.array("y"), x)
