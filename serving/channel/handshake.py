"""Who may talk on a channel: both ends prove that they know the run's key, and say nothing of it.

::

    replica → gateway   greeting: magic and version, nonce of the replica
    gateway → replica   nonce of the gateway, HMAC-SHA256(key, "gateway" + both nonces)
    replica → gateway   HMAC-SHA256(key, "replica" + both nonces)

Neither end reads a frame before that. What follows is not encrypted: on one machine it never
leaves the kernel; between machines the network is trusted, as it is for Ray's own calls.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

MAGIC = b"halftone-channel-1\0\0\0\0\0\0"
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
#: From the connection to the last proof.
HANDSHAKE_TIMEOUT_S = 5.0


class HandshakeError(Exception):
    """The peer speaks another protocol, or does not know the key."""


def new_nonce() -> bytes:
    """A nonce for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def greeting(replica_nonce: bytes) -> bytes:
    """What a replica says first."""
    return MAGIC + replica_nonce


def answer(key: bytes, greeted: bytes, gateway_nonce: bytes) -> bytes:
    """What a gateway answers to a replica's greeting.

    Raises:
        HandshakeError: it is no greeting of this version.
    """
    if not greeted.startswith(MAGIC):
        raise HandshakeError("the peer does not speak this version of the channel")
    return gateway_nonce + _proof(key, b"gateway", greeted[len(MAGIC) :], gateway_nonce)


def acceptance(key: bytes, replica_nonce: bytes, answered: bytes) -> bytes:
    """What a replica says to a gateway that proved itself.

    Raises:
        HandshakeError: it did not.
    """
    gateway_nonce, proof = answered[:NONCE_BYTES], answered[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"gateway", replica_nonce, gateway_nonce)):
        raise HandshakeError("the peer does not know the key of this run")
    return _proof(key, b"replica", replica_nonce, gateway_nonce)


def check_acceptance(key: bytes, greeted: bytes, gateway_nonce: bytes, accepted: bytes) -> None:
    """Check, on the gateway, that the replica knows the key too.

    Raises:
        HandshakeError: it does not.
    """
    expected = _proof(key, b"replica", greeted[len(MAGIC) :], gateway_nonce)
    if not hmac.compare_digest(accepted, expected):
        raise HandshakeError("the replica does not know the key of this run")


def _proof(key: bytes, role: bytes, replica_nonce: bytes, gateway_nonce: bytes) -> bytes:
    return hmac.digest(key, role + replica_nonce + gateway_nonce, "sha256")
