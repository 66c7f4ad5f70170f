"""The room for bodies: never overfilled, but by one that has it to itself."""

from hypothesis import given
from hypothesis import strategies as st

from serving.protocol.body_room import BodyRoom

LIMIT_BYTES = 100


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 80), st.booleans()), max_size=40))
def test_what_is_held(steps: list[tuple[int, int, bool]]) -> None:
    """The sum of all, within the limit unless one body alone exceeds it."""
    room = BodyRoom(LIMIT_BYTES)
    own = [0] * 5
    for who, size_bytes, gives_back in steps:
        if gives_back:
            room.release(own[who])
            own[who] = 0
        elif room.take(size_bytes, own[who]):
            own[who] += size_bytes
        else:
            assert sum(own) > own[who]
            assert sum(own) + size_bytes > LIMIT_BYTES
        assert room.held_bytes == sum(own)
        assert sum(own) <= LIMIT_BYTES or sum(map(bool, own)) == 1
