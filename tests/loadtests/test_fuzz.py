"""The fuzzer: its requests are the same each time, and it sees what is wrong with an answer."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.fuzz.__main__ import Found, fuzz, report
from loadtests.fuzz.client import Client, NoAnswer, Reply, replies_in
from loadtests.fuzz.message import Message
from loadtests.fuzz.mutations import Sent, mutated
from loadtests.fuzz.seeds import seeds
from loadtests.fuzz.verdict import fault
from loadtests.growth import Figures, Watch
from loadtests.growth.figures import Sample

SEEDS = seeds()
ERROR = json.dumps({"error": "no", "code": "bad_json", "id": "7"}).encode()
JSON = {"content-type": "application/json", "x-request-id": "7"}
SENT = Sent(SEEDS[0].wire(), True, SEEDS[0])
CRITICAL = SEEDS[0].with_header(b"x-precision", b"critical")
HEADER = st.tuples(st.sampled_from([b"a", b"b-c"]), st.binary(max_size=5).map(lambda raw: raw.hex().encode()))


def test_requests_are_the_same_each_time_and_not_all_alike() -> None:
    """By seed and number, in whatever order they are made."""
    once = [mutated(number, 3, SEEDS).wire for number in range(300)]
    again = [mutated(number, 3, SEEDS).wire for number in reversed(range(300))]
    assert once == again[::-1]
    assert once != [mutated(number, 4, SEEDS).wire for number in range(300)]
    assert len({zlib.crc32(wire) for wire in once}) > 150


def test_good_requests_are_what_is_spoiled() -> None:
    """Making spoiled ones leaves them as they are."""
    before = [message.wire() for message in SEEDS]
    for number in range(500):
        mutated(number, 0, SEEDS)
    assert [message.wire() for message in seeds()] == before


@given(
    target=st.sampled_from([b"/", b"/a?b=c"]),
    headers=st.lists(HEADER, max_size=3).map(tuple),
    body=st.binary(max_size=30),
)
def test_a_message_survives_the_wire(
    target: bytes, headers: tuple[tuple[bytes, bytes], ...], body: bytes
) -> None:
    """Taken apart again, it is what it was."""
    message = Message(b"POST", target, headers, body)
    assert Message.parse(message.wire()) == message


def test_chunks_hold_the_whole_body() -> None:
    """Whatever their sizes."""
    message = Message(b"POST", b"/", (), b"abcdefg", (1, 3))
    assert message.wire().endswith(b"\r\n\r\n1\r\na\r\n3\r\nbcd\r\n3\r\nefg\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("sent", "reply", "words"),
    [
        (SENT, Reply(200, JSON, b'{"a":1}'), None),
        (SENT, Reply(400, JSON, ERROR), None),
        (SENT, Reply(400, {}, b""), "without a body"),
        (SENT, Reply(500, JSON, ERROR), "status 500"),
        (SENT, Reply(503, JSON, ERROR), "status 503"),
        (SENT, Reply(504, JSON, ERROR), "status 504"),
        (Sent(SENT.wire + b"x-request-timeout-seconds", True, None), Reply(504, JSON, ERROR), None),
        (SENT, Reply(404, {}, b""), "without a body"),
        (SENT, Reply(400, JSON, b"oops"), "another shape"),
        (SENT, Reply(400, JSON, b'{"error":"no"}'), "another shape"),
        (SENT, Reply(400, {**JSON, "x-request-id": "8"}, ERROR), "not the reply's"),
        (SENT, Reply(400, JSON, ERROR.replace(b"no", b"Traceback")), "internals"),
        (SENT, Reply(200, JSON, b'{"a":NaN}'), "no JSON"),
        (SENT, Reply(200, JSON, b'{"a":'), "no JSON"),
        (SENT, Reply(200, {"content-type": "application/octet-stream"}, b"{}"), "before the tensors"),
        (
            Sent(b"", True, CRITICAL),
            Reply(200, {**JSON, "x-precision-tier": "fp16"}, b"{}"),
            "answered by fp16",
        ),
        (Sent(b"", True, CRITICAL), Reply(200, {**JSON, "x-precision-tier": "fp32"}, b"{}"), None),
        (Sent(b"HEAD / HTTP/1.1", True, None), Reply(404, {}, b""), None),
    ],
)
def test_what_is_wrong_with_an_answer_is_seen(sent: Sent, reply: Reply, words: str | None) -> None:
    """Each kind of fault, and answers without any."""
    found = fault(sent, reply)
    assert found is None if words is None else words in (found or "")


def serve(answer: bytes, ask: Callable[[str, int], Awaitable[object]]) -> object:
    """What `ask` gets from a server that answers everything like this, and closes."""

    async def both() -> object:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with server:
            return await ask("127.0.0.1", server.sockets[0].getsockname()[1])

    return asyncio.run(both())


def test_a_server_that_fails_is_found_out() -> None:
    """500 for everything: each request is a finding."""
    answer = b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    found = serve(answer, lambda host, port: fuzz(f"http://{host}:{port}", range(20), 0, connections=2))
    assert isinstance(found, Found)
    assert len(found.faults) >= 19
    assert all("status 500" in text for text in found.faults.values())


def test_silence_is_a_finding() -> None:
    """A connection that is closed without an answer to a whole request."""
    with pytest.raises(NoAnswer, match="IncompleteRead"):
        serve(b"", lambda host, port: Client(host, port).exchange(SENT))


def test_replies_in_a_row_are_told_apart() -> None:
    """As many as there are; the interim one is none, and one that was cut off is left out."""
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    received = b"HTTP/1.1 100 Continue\r\n\r\n" + good + b"HTTP/1.1 400 B\r\n\r\nHTTP/1."
    found = asyncio.run(replies_in(received))
    assert found == [Reply(200, {"content-length": "2"}, b"ok"), Reply(400, {}, b"")]


def watched(series: int, resident_mib: float) -> Watch:
    """Ten samples of a server whose figures grow by that much each second."""
    watch = Watch("http://127.0.0.1:1", 1, Path())
    watch.samples = [
        Sample(
            float(second),
            {"gateway 1": Figures(100 + resident_mib * second, 10, 10, 1)},
            frozenset(f"s{number}" for number in range(series * second + 1)),
        )
        for second in range(10)
    ]
    return watch


def test_growth_and_new_series_are_findings() -> None:
    """And nothing is found where there is none."""
    assert report(Found(), watched(0, 0), 2.0, [])["problems"] == []
    assert "gateway 1 grows" in report(Found(), watched(0, 5), 2.0, [])["problems"][0]
    assert "new metric series" in report(Found(), watched(3, 0), 2.0, [])["problems"][0]
    assert report(Found(faults={4: "odd"}), watched(0, 0), 2.0, ["v2: 503"])["problems"] == [
        "v2: 503",
        "request 4: odd",
    ]
