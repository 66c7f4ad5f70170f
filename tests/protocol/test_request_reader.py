"""What bytes become: the same requests however they arrive, or a refusal."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import RequestError
from serving.protocol.body_room import BodyRoom
from serving.protocol.http import UNDECODABLE, Request
from serving.protocol.known_heads import KnownHeads
from serving.protocol.request_reader import (
    _NAMES,
    MAX_PROMISED_BYTES,
    ReadLimits,
    ReadRequest,
    RequestReader,
)

LIMITS = ReadLimits(max_body_bytes=1000, max_body_chunks=10)
TOKENS = st.text("abcXYZ0189-_", min_size=1, max_size=8)
VALUES = st.text("abc xyz,;=/", max_size=12)


def reader(
    limits: ReadLimits = LIMITS, room: BodyRoom | None = None, heads: KnownHeads | None = None
) -> RequestReader:
    """A new one, which knows no head unless it is told some."""
    return RequestReader(limits, room or BodyRoom(10_000), KnownHeads() if heads is None else heads)


def read_all(*pieces: bytes) -> tuple[list[Request], RequestError | None]:
    """The requests in what arrives, and what ends them."""
    reading = reader()
    for piece in pieces:
        reading.feed(piece)
    return [read.request for read in reading.requests], reading.error


@st.composite
def sent_requests(draw: st.DrawFn) -> tuple[Request, bytes]:
    """A request, and one way to send it."""
    method = draw(st.sampled_from(["GET", "POST", "HEAD", "DELETE"]))
    path, query = "/" + draw(TOKENS), draw(TOKENS)
    headers = draw(st.lists(st.tuples(TOKENS.map("x-{}".format), VALUES), max_size=5))
    body = draw(st.binary(max_size=300))
    lines = [f"{name}: {value}" for name, value in headers]
    if draw(st.booleans()):
        lines += ["Connection: Upgrade", "Upgrade: h2c"]
    if draw(st.booleans()):
        pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
        encoded = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        lines.append("transfer-encoding: chunked")
    else:
        encoded = body
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join([f"{method} {path}?{query} HTTP/1.1", *lines, "", ""])
    return Request(method, path, query, body=body), head.encode() + encoded


@given(st.lists(sent_requests(), min_size=1, max_size=4), st.data())
def test_the_same_requests_however_they_arrive(
    sent: list[tuple[Request, bytes]], data: st.DataObject
) -> None:
    """Whole, byte by byte, or cut anywhere."""
    stream = b"".join(wire for _, wire in sent)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=6)))
    ways = [
        [stream],
        [bytes([byte]) for byte in stream],
        [stream[start:end] for start, end in itertools.pairwise([0, *cuts, len(stream)])],
    ]
    for pieces in ways:
        found, error = read_all(*pieces)
        assert error is None
        assert [(r.method, r.path, r.query, r.body) for r in found] == [
            (r.method, r.path, r.query, r.body) for r, _ in sent
        ]


@given(st.lists(sent_requests(), min_size=1, max_size=4), st.data())
def test_known_heads_change_nothing(sent: list[tuple[Request, bytes]], data: st.DataObject) -> None:
    """Whatever was read before on other connections, and however it was cut there."""
    heads = KnownHeads()
    pieces = [wire for _, wire in sent] + [b"", b"\r\n", b"\r\n\r\n", b"".join(wire for _, wire in sent)]
    for piece in data.draw(st.lists(st.sampled_from(pieces), max_size=8)):
        reader(heads=heads).feed(piece)
    stream = data.draw(st.lists(st.sampled_from(pieces), max_size=8))
    with_heads, without = reader(heads=heads), reader()
    for piece in stream:
        with_heads.feed(piece)
        without.feed(piece)
    assert (with_heads.error is None) == (without.error is None)
    assert [_contents(read) for read in with_heads.requests] == [_contents(read) for read in without.requests]
    assert with_heads.has_begun == without.has_begun


def _contents(read: ReadRequest) -> tuple[Any, ...]:
    request = read.request
    head = (request.method, request.path, request.query, request.headers.items())
    return (*head, request.body, read.held_bytes, read.keeps_alive, read.is_old)


def test_a_head_is_parsed_once() -> None:
    """The next request that begins like it shares its headers, with another body of that size."""
    heads = KnownHeads()
    head = b"POST /a?b HTTP/1.1\r\nX-A: 1\r\nContent-Length: 3\r\n\r\n"
    found = []
    for body in (b"abc", b"def"):
        reading = reader(heads=heads)
        reading.feed(head + body)
        found.append(reading.requests.popleft().request)
    assert [request.body for request in found] == [b"abc", b"def"]
    assert found[0].headers is found[1].headers


def test_a_known_head_finds_no_room_either() -> None:
    """It is refused like a new one, with its headers."""
    heads, room = KnownHeads(), BodyRoom(100)
    wire = b"POST / HTTP/1.1\r\nX-Request-Id: r\r\nContent-Length: 90\r\n\r\n" + bytes(90)
    first, second = reader(room=room, heads=heads), reader(room=room, heads=heads)
    first.feed(wire)
    second.feed(wire)
    assert second.error is not None
    assert second.error.code == "overloaded"
    assert second.error_headers is not None
    assert second.error_headers.get("x-request-id") == "r"
    assert room.held_bytes == 90


@given(st.lists(st.tuples(TOKENS.map("X-{}".format), VALUES), max_size=20))
def test_no_header_is_lost(headers: list[tuple[str, str]]) -> None:
    """Every value, in order, under its name in lower case, without the spaces around it."""
    lines = b"".join(f"{name}: {value} \r\n".encode() for name, value in headers)
    (request,), _ = read_all(b"GET / HTTP/1.1\r\n" + lines + b"\r\n")
    for name in {name.lower() for name, _ in headers}:
        assert request.headers.get_all(name) == [v.strip() for n, v in headers if n.lower() == name]


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET / HTTP/1.1\n\n",
        b"GET / HTTP/1.1\r\nX: a\nY: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
        b"GET / HTTP/1.1\r\nX : a\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET path HTTP/1.1\r\n\r\n",
        b"GET / x HTTP/1.1\r\n\r\n",
        b"CONNECT host:80 HTTP/1.1\r\n\r\n",
        # Requests in which another parser could see another body.
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nContent-Length: 3, 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 0x3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(sent: bytes) -> None:
    """However it is cut; what came before it is read."""
    before = b"GET /before HTTP/1.1\r\n\r\n"
    for pieces in ([before + sent], [before, *(bytes([byte]) for byte in sent)]):
        found, error = read_all(*pieces)
        assert [request.path for request in found] == ["/before"]
        assert error is not None
        assert (error.status, error.code) == (400, "bad_request")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 101 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X" * 70_000, 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"a" * 1001, 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 11, 413),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1 << 20, 100])
def test_limits_of_size(sent: bytes, status: int, piece_bytes: int) -> None:
    """In one piece or in many, and before all of it has come."""
    room = BodyRoom(10_000)
    reading = reader(room=room)
    for start in range(0, len(sent), piece_bytes):
        reading.feed(sent[start : start + piece_bytes])
    assert reading.error is not None
    assert reading.error.status == status
    assert not reading.requests
    assert room.held_bytes == 0


def test_at_the_limits_it_is_read() -> None:
    """Exactly as many."""
    found, error = read_all(
        b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 100 + b"\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n" + bytes(1000),
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 9 + b"0\r\n\r\n",
    )
    assert error is None
    assert [len(request.body) for request in found] == [0, 1000, 9]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("piece_bytes", [1, 1000])
def test_an_upgrade_is_declined(framing: bytes, piece_bytes: int) -> None:
    """The request is read as if none were offered, its body too, and the one after it."""
    sent = (
        b"POST /a?b HTTP/1.1\r\nX-Precision: fp32\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n" + framing + b"GET /next HTTP/1.1\r\n\r\n"
    )
    (first, second), error = read_all(*(sent[i : i + piece_bytes] for i in range(0, len(sent), piece_bytes)))
    assert error is None
    assert (first.method, first.path, first.query, first.body) == ("POST", "/a", "b", b"abc")
    assert first.headers.get("x-precision") == "fp32"
    assert first.headers.get("upgrade") == "h2c"
    assert second.path == "/next"


def test_whether_the_connection_stays_open() -> None:
    """By default from 1.1 on; as asked otherwise, also beside an upgrade."""
    cases = {
        b"HTTP/1.1\r\n": (True, False),
        b"HTTP/1.1\r\nConnection: close\r\n": (False, False),
        b"HTTP/1.0\r\n": (False, True),
        b"HTTP/1.0\r\nConnection: keep-alive\r\n": (True, True),
        b"HTTP/1.1\r\nConnection: upgrade, close\r\nUpgrade: h2c\r\n": (False, False),
    }
    for rest, expected in cases.items():
        reading = reader()
        reading.feed(b"GET / " + rest + b"\r\n")
        (read,) = reading.requests
        assert (read.keeps_alive, read.is_old) == expected, rest


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"/a%20b%2Fc?x=%20", "/a b/c", "x=%20"),
        (b"/a?b?c", "/a", "b?c"),
        (b"/a#b?c", "/a", ""),
        (b"/%ff", "/\N{REPLACEMENT CHARACTER}", ""),
        (b"http://host:80/a?b", "/a", "b"),
        (b"http://host", "/", ""),
        (b"*", "*", ""),
    ],
)
def test_targets(target: bytes, path: str, query: str) -> None:
    """Path and query of each form in RFC 9112, section 3.2."""
    (request,), _ = read_all(b"OPTIONS " + target + b" HTTP/1.1\r\n\r\n")
    assert (request.path, request.query) == (path, query)


def test_an_upgrade_leaves_nothing_to_other_requests() -> None:
    """Its headers are neither those of a request that looks like it without them, nor of the next one."""
    heads = KnownHeads()
    bare = b"GET /p HTTP/1.1\r\n\r\n"
    offer = b"GET /p HTTP/1.1\r\nAuthorization: Bearer a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    after = b"POST /q HTTP/1.1\r\nX-B: b\r\nContent-Length: 3\r\n\r\nabc"
    for stream in ([offer, bare], [bare, offer, after], [offer, after, bare]):
        reading = reader(heads=heads)
        for piece in stream:
            reading.feed(piece)
        found = {
            read.request.path + str(len(read.request.headers)): read.request for read in reading.requests
        }
        assert len(found) == len(stream)
        for request in found.values():
            told = request.headers.get("authorization") is not None
            assert told == ("upgrade" in request.headers)
            assert ("x-b" in request.headers) == (request.path == "/q")


def test_many_upgrades_at_once() -> None:
    """Each is declined."""
    found, error = read_all(b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n" * 3000)
    assert (len(found), error) == (3000, None)


@pytest.mark.parametrize("version", [b"2.0", b"0.9"])
def test_an_upgrade_of_another_version(version: bytes) -> None:
    """Is no HTTP/1.1 either."""
    _, error = read_all(b"GET / HTTP/" + version + b"\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert error is not None
    assert error.status == 400


@pytest.mark.parametrize(
    "rest",
    [b"0\r\nX-T: " + b"a" * 200_000, b"0\r\n" + b"X-T: 1\r\n" * 101 + b"\r\n", b"1;x=" + b"a" * 200_000],
    ids=["trailer", "trailers", "extension"],
)
@pytest.mark.parametrize("piece_bytes", [1 << 20, 1000])
def test_what_comes_beside_a_chunked_body_is_bounded(rest: bytes, piece_bytes: int) -> None:
    """Trailers and extensions, of which nobody asks anything."""
    reading = reader()
    stream = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n" + rest
    for start in range(0, len(stream), piece_bytes):
        reading.feed(stream[start : start + piece_bytes])
    assert reading.error is not None
    assert reading.error.status == 431


def test_the_end_of_a_body_does_not_count_for_the_next_head() -> None:
    """Though both come in one piece, and the head goes on in another."""
    body = bytes(100_000)
    sent = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    reading = reader(ReadLimits(max_body_bytes=1_000_000), BodyRoom(1_000_000))
    for piece in (sent[:100], sent[100:] + b"GET /n HTTP/1.1\r\nX-", b"A: b\r\n\r\n"):
        reading.feed(piece)
    assert reading.error is None
    assert [read.request.path for read in reading.requests] == ["/", "/n"]


def test_long_names_are_not_remembered() -> None:
    """Or a client could fill the memory with them."""
    before = len(_NAMES)
    for number in range(10):
        read_all(b"GET / HTTP/1.1\r\n" + b"x%d" % number * 30_000 + b": 1\r\n\r\n")
    assert len(_NAMES) == before


def test_trailers_are_no_headers() -> None:
    """They would come after the decision that a header is for."""
    sent = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Precision: fp16\r\n\r\n"
    (request,), _ = read_all(sent)
    assert "x-precision" not in request.headers


def test_values_that_are_no_text() -> None:
    """Present but unreadable, each of them."""
    (request,), _ = read_all(b"GET / HTTP/1.1\r\nX-A: \xff\r\nX-A: b\r\nX-B:\r\n\r\n")
    assert request.headers.get_all("x-a") == [UNDECODABLE, "b"]
    assert request.headers.get("x-b") == ""


@pytest.mark.parametrize("end", ["answered", "closed", "refused"])
def test_the_room_gets_back_what_was_taken(end: str) -> None:
    """A body that is read, one that nobody waits for any more, one that is no body after all."""
    room = BodyRoom(1000)
    reading = reader(room=room)
    reading.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    assert room.held_bytes == 3
    if end == "refused":
        reading.feed(b"no size\r\n")
        assert reading.error is not None
    elif end == "answered":
        reading.feed(b"0\r\n\r\n")
        room.release(reading.requests.popleft().held_bytes)
    reading.close()
    assert room.held_bytes == 0


def test_a_full_room() -> None:
    """Whoever is alone gets in, others wait for another time; a large promise takes nothing."""
    room = BodyRoom(100)
    large = ReadLimits(max_body_bytes=1 << 30)
    first, second, third = (reader(large, room) for _ in range(3))
    first.feed(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_PROMISED_BYTES + 1))
    assert room.held_bytes == 0
    second.feed(b"POST / HTTP/1.1\r\nContent-Length: 300\r\n\r\n")
    assert (second.error, room.held_bytes) == (None, 300)
    third.feed(b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n")
    assert third.error is not None
    assert third.error.code == "overloaded"
    first.feed(b"a")
    assert first.error is not None
    assert first.error.headers == (("retry-after", "1"),)


def test_a_fault_of_our_own_is_no_fault_of_the_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and answered as such."""

    def fail(*_: Any) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("serving.protocol.request_reader.Request", fail)
    _, error = read_all(b"GET / HTTP/1.1\r\n\r\n")
    assert error is not None
    assert error.code == "internal"
    assert "ours" in caplog.text


@given(
    st.lists(
        st.one_of(
            sent_requests().map(lambda sent: sent[1]),
            st.binary(max_size=60),
            st.sampled_from(
                [
                    b"\r\n",
                    b"\r\n\r\n",
                    b": ",
                    b"Transfer-Encoding: chunked\r\n",
                    b"Content-Length: 5\r\n",
                    b"0\r\n\r\n",
                ]
            ),
        ),
        max_size=8,
    ),
    st.integers(1, 40),
)
def test_whatever_arrives_is_read_or_refused(parts: list[bytes], piece_bytes: int) -> None:
    """Without an exception, and in the end nothing is held."""
    room = BodyRoom(10_000)
    reading = reader(room=room)
    stream = b"".join(parts)
    for start in range(0, len(stream), piece_bytes):
        reading.feed(stream[start : start + piece_bytes])
        assert reading.error is None or reading.error.status in {400, 413, 414, 431, 503}
    reading.close()
    assert room.held_bytes == 0
