"""Decompression: every encoding, its abuses, and the bound on what comes out."""

import contextlib
import gzip
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import BadJson, TooLarge, UnsupportedMedia
from serving.protocol.compression import decompress


def raw_deflate(data: bytes) -> bytes:
    """A deflate stream without the zlib header."""
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


ENCODERS = {
    "identity": bytes,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    " GZip ": gzip.compress,
}


@pytest.mark.parametrize("encoding", ENCODERS)
@given(data=st.binary(max_size=300))
def test_round_trip(encoding: str, data: bytes) -> None:
    """What was compressed comes back, up to a limit that it just meets."""
    assert decompress(ENCODERS[encoding](data), encoding, len(data)) == data


@given(data=st.binary(max_size=300))
def test_raw_deflate(data: bytes) -> None:
    """Some clients send `deflate` without the zlib header."""
    assert decompress(raw_deflate(data), "deflate", 300) == data


def test_no_encoding_is_identity() -> None:
    """An absent header leaves the body as it is, still bounded."""
    assert decompress(b"abc", None, 3) == b"abc"
    with pytest.raises(TooLarge):
        decompress(b"abcd", None, 3)


@pytest.mark.parametrize("encoder", [gzip.compress, zlib.compress, raw_deflate])
def test_one_byte_too_many(encoder: Any) -> None:
    """The limit is exact."""
    encoding = "gzip" if encoder is gzip.compress else "deflate"
    with pytest.raises(TooLarge):
        decompress(encoder(b"x" * 101), encoding, 100)


def test_a_bomb_costs_no_more_than_the_limit() -> None:
    """64 MiB of zeros in 64 KiB are refused within a few megabytes."""
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decompress(bomb, "gzip", 2 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_gzip_members_are_concatenated_and_bounded_together() -> None:
    """RFC 1952 allows several members; the limit holds for their sum."""
    members = gzip.compress(b"ab") + gzip.compress(b"cd")
    assert decompress(members, "gzip", 4) == b"abcd"
    with pytest.raises(TooLarge):
        decompress(members, "gzip", 3)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("cut", [0, 1, 5, -1, -4])
def test_truncated(encoding: str, cut: int) -> None:
    """A stream that stops early is no body."""
    whole = ENCODERS[encoding](b"some text, some text, some text")
    with pytest.raises(BadJson):
        decompress(whole[:cut], encoding, 1000)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_trailing_data(encoding: str) -> None:
    """What follows the stream must not be dropped in silence."""
    with pytest.raises(BadJson):
        decompress(ENCODERS[encoding](b"text") + b"more", encoding, 1000)


def test_many_empty_members() -> None:
    """Members that give nothing cannot keep the server busy."""
    with pytest.raises(BadJson):
        decompress(gzip.compress(b"") * 2000, "gzip", 10)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "identity, gzip", "", "\ufffd", "a" * 9999])
def test_unknown_and_stacked_encodings(encoding: str) -> None:
    """What is not served is said so, in few words."""
    with pytest.raises(UnsupportedMedia) as caught:
        decompress(b"", encoding, 10)
    assert len(str(caught.value)) < 200


@given(data=st.binary(max_size=100), encoding=st.sampled_from(["gzip", "deflate"]))
def test_arbitrary_bytes(data: bytes, encoding: str) -> None:
    """Garbage is refused or, by luck, decoded."""
    with contextlib.suppress(BadJson, TooLarge):
        decompress(data, encoding, 1000)
