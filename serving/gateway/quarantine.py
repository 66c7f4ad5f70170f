"""Rows that ended the processes which computed them: known by a hash, refused for a while."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from serving.errors import Quarantined
from serving.tensors import Tensors, row_count, slice_rows

#: Long enough that a client's retries do not end one replica after another; a repaired model or
#: driver gets another try.
QUARANTINE_S = 300.0
MAX_ROWS = 1024
_DIGEST_BYTES = 16


class Quarantine:
    """One tier's. Empty, which it nearly always is, it costs nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        #: Digest of a row -> until when it is refused; the oldest first.
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, row: Tensors) -> None:
        """Refuse a row, [1, ...], from now on. The oldest one makes room."""
        digest = _digest(row)
        self._until_s[digest] = self._clock() + QUARANTINE_S
        self._until_s.move_to_end(digest)
        while len(self._until_s) > MAX_ROWS:
            self._until_s.popitem(last=False)

    def check(self, tensors: Tensors) -> None:
        """Look at a request's rows, [rows, ...].

        Raises:
            Quarantined: one of them is refused.
        """
        now_s = self._clock()
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        if not self._until_s:
            return
        for row in range(row_count(tensors)):
            if _digest(slice_rows(tensors, row, row + 1)) in self._until_s:
                raise refusal(row)


def refusal(row: int) -> Quarantined:
    """What the request of a refused row is told."""
    return Quarantined(
        f"row {row} ended the process that computed it, more than once; "
        f"it is not computed again for {QUARANTINE_S / 60:g} minutes"
    )


def _digest(row: Tensors) -> bytes:
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, array in row.items():
        # Dtype and shape say how long the content is, so that no two different rows run together.
        found.update(repr((name, array.dtype.str, array.shape)).encode())
        found.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    return found.digest()
