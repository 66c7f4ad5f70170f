"""Certificates for tests: an authority of their own, and what can be wrong with a pair of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """A server's files, and the authority that signed its certificate."""

    certificate: Path
    key: Path
    ca: Path


def issue(folder: Path, *names: str, authority: trustme.CA | None = None) -> Pair:
    """A pair for these names in a folder that need not exist yet; written over the one before."""
    folder.mkdir(exist_ok=True)
    authority = authority or trustme.CA()
    issued = authority.issue_cert(*names)
    pair = Pair(folder / "server.pem", folder / "server.key", folder / "ca.pem")
    pair.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(pair.key))
    authority.cert_pem.write_to_path(str(pair.ca))
    return pair
