"""What is remembered of heads is bounded."""

from serving.protocol.http import Headers
from serving.protocol.known_heads import MAX_KNOWN_HEAD_BYTES, MAX_KNOWN_HEADS, KnownHead, KnownHeads

KNOWN = KnownHead("GET", "/", "", Headers(), 0, keeps_alive=True, is_old=False)


def test_in_number() -> None:
    """The newest is always among them."""
    heads = KnownHeads()
    for number in range(3 * MAX_KNOWN_HEADS):
        heads.put(b"%d" % number, KNOWN)
        assert heads.get(b"%d" % number) is KNOWN
        assert len(heads) <= MAX_KNOWN_HEADS


def test_in_size() -> None:
    """A large one is parsed each time."""
    heads = KnownHeads()
    heads.put(b"a" * MAX_KNOWN_HEAD_BYTES, KNOWN)
    heads.put(b"a" * (MAX_KNOWN_HEAD_BYTES + 1), KNOWN)
    assert len(heads) == 1
