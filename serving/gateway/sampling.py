"""Which rows are compared: decided by the request's id, so that a replay chooses the same ones."""

from __future__ import annotations

import hashlib

import numpy as np

_MASK = (1 << 64) - 1
_SCALE = float(1 << 64)
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: From so many rows on numpy is faster than plain integers.
_MANY_ROWS = 16


def sampled_rows(request_id: str, rows: int, share: float) -> list[int]:
    """The rows of a request that are in the sample.

    Each row has an evenly distributed number of 64 bits, from the id's BLAKE2 digest and the row's
    index through SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), and is in when it is small.
    """
    if share >= 1:
        return list(range(rows))
    if share <= 0:
        return []
    limit = int(share * _SCALE)
    seed = int.from_bytes(hashlib.blake2b(request_id.encode("utf-8", "replace"), digest_size=8).digest())
    if rows >= _MANY_ROWS:
        return _sampled_of_many(seed, rows, limit)
    return [row for row in range(rows) if _mixed(seed, row) < limit]


def _mixed(seed: int, row: int) -> int:
    value = (seed + (row + 1) * _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _sampled_of_many(seed: int, rows: int, limit: int) -> list[int]:
    """The same as an array; its integers of 64 bits wrap by themselves."""
    value = np.uint64(seed) + np.arange(1, rows + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_SECOND)
    chosen: list[int] = np.flatnonzero((value ^ (value >> np.uint64(31))) < np.uint64(limit)).tolist()
    return chosen
