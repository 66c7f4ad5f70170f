"""Which rows are compared: decided by the request's id, so that a replay chooses the same ones."""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1
_SCALE = float(1 << 64)


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
    return [row for row in range(rows) if _mixed(seed, row) < limit]


def _mixed(seed: int, row: int) -> int:
    value = (seed + (row + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
