"""The handshake: both ends know the key, or there is no channel."""

import pytest

from serving.channel.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    PROOF_BYTES,
    HandshakeError,
    acceptance,
    answer,
    check_acceptance,
    greeting,
    new_nonce,
)

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def test_two_ends_with_one_key_agree() -> None:
    """And every message has the length that the other end waits for."""
    replica_nonce, gateway_nonce = new_nonce(), new_nonce()
    greeted = greeting(replica_nonce)
    answered = answer(KEY, greeted, gateway_nonce)
    accepted = acceptance(KEY, replica_nonce, answered)
    check_acceptance(KEY, greeted, gateway_nonce, accepted)
    assert (len(greeted), len(answered), len(accepted)) == (GREETING_BYTES, ANSWER_BYTES, PROOF_BYTES)


def test_a_gateway_without_the_key_is_refused() -> None:
    """Nor is an answer to another greeting taken."""
    replica_nonce = new_nonce()
    with pytest.raises(HandshakeError):
        acceptance(KEY, replica_nonce, answer(OTHER_KEY, greeting(replica_nonce), new_nonce()))
    with pytest.raises(HandshakeError):
        acceptance(KEY, replica_nonce, answer(KEY, greeting(new_nonce()), new_nonce()))


def test_a_replica_without_the_key_is_refused() -> None:
    """It would be told what callers send."""
    replica_nonce, gateway_nonce = new_nonce(), new_nonce()
    greeted = greeting(replica_nonce)
    answered = answer(KEY, greeted, gateway_nonce)
    proof_of_gateway = answered[-PROOF_BYTES:]
    for accepted in (proof_of_gateway, bytes(PROOF_BYTES)):
        with pytest.raises(HandshakeError):
            check_acceptance(KEY, greeted, gateway_nonce, accepted)


def test_another_protocol_is_refused() -> None:
    """Before a proof is made of the key."""
    with pytest.raises(HandshakeError, match="version"):
        answer(KEY, b"HTTP/1.1 400 Bad Request".ljust(GREETING_BYTES), new_nonce())
