"""The server's certificate and key: checked before anything starts, and recognised by its own client."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from serving.errors import ConfigError

CERTIFICATE_FIELD = "server.tls_certificate"
KEY_FIELD = "server.tls_key"
_FIRST_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
#: What the server's TLS library signs with, as a certificate names its key (DER, AlgorithmIdentifier).
#: On any other key, P-521's among them, it ends the whole process.
_RSA = bytes.fromhex("06092a864886f70d0101010500")
_USABLE_KEYS = {
    _RSA: "RSA of 2048 to 4096 bits",
    bytes.fromhex("06072a8648ce3d020106082a8648ce3d030107"): "ECDSA P-256",
    bytes.fromhex("06072a8648ce3d020106052b81040022"): "ECDSA P-384",
    bytes.fromhex("06032b6570"): "Ed25519",
}
_RSA_BITS = range(2048, 4097)
#: DER tag of a certificate's version, which may be absent.
_VERSION_TAG = 0xA0


class _Encrypted(Exception):
    """A password was asked for."""


def check_certificate(certificate: Path, key: Path) -> None:
    """Refuse files with which the server could not speak TLS.

    Args:
        certificate: the chain in PEM, the server's own certificate first.
        key: its private key in PEM.

    Raises:
        ConfigError: with the field's path: one of them cannot be read, is no such file, is
            encrypted, or they do not belong together.
    """
    leaf = leaf_certificate(certificate)
    _check_readable(key, KEY_FIELD)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cafile=certificate)
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate}: {_reason(error)}", CERTIFICATE_FIELD) from error
    if not _has_usable_key(leaf):
        known = ", ".join(_USABLE_KEYS.values())
        raise ConfigError(f"{certificate} has a key that cannot be used here; {known}", CERTIFICATE_FIELD)
    try:
        context.load_cert_chain(certificate, key, _refuse_password)
    except _Encrypted as error:
        raise ConfigError(f"{key} is encrypted, and nobody is asked for its password", KEY_FIELD) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key} is not the key of {certificate}", KEY_FIELD) from error
        if error.reason in {"CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"}:
            raise ConfigError(f"{certificate}: {_reason(error)}", CERTIFICATE_FIELD) from error
        raise ConfigError(f"{key} holds no private key in PEM: {_reason(error)}", KEY_FIELD) from error


def leaf_certificate(certificate: Path) -> bytes:
    """The first certificate of a PEM file, the server's own, as DER.

    Raises:
        ConfigError: the file cannot be read or holds none.
    """
    _check_readable(certificate, CERTIFICATE_FIELD)
    found = _FIRST_CERTIFICATE.search(certificate.read_bytes())
    if found is None:
        raise ConfigError(f"{certificate} holds no certificate in PEM", CERTIFICATE_FIELD)
    try:
        return ssl.PEM_cert_to_DER_cert(found[0].decode("ascii"))
    except ValueError as error:
        raise ConfigError(f"{certificate} holds no certificate in PEM", CERTIFICATE_FIELD) from error


def trusting_context(certificates: Path) -> ssl.SSLContext:
    """For clients that trust what a PEM file holds, be it authorities or the server's own certificate.

    Raises:
        OSError: the file cannot be read, or holds no certificate (`ssl.SSLError`).
    """
    context = ssl.create_default_context(cafile=str(certificates))
    # A certificate that somebody else signed is trusted for itself, as curl's --cacert does.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _has_usable_key(certificate: bytes) -> bool:
    """Whether the server can sign with the key of a certificate, in DER that OpenSSL could read."""
    fields = _parts(_parts(_parts(certificate)[0][1])[0][1])
    # [version], serial number, signature, issuer, validity, subject, public key
    public_key = fields[6 if fields[0][0] == _VERSION_TAG else 5][1]
    (_, algorithm), (_, bits) = _parts(public_key)
    if algorithm != _RSA:
        return algorithm in _USABLE_KEYS
    modulus = _parts(_parts(bits[1:])[0][1])[0][1]  # After the count of unused bits, which is 0.
    return int.from_bytes(modulus).bit_length() in _RSA_BITS


def _parts(der: bytes) -> list[tuple[int, bytes]]:
    """Tag and content of each value in a row of DER values."""
    parts, at = [], 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:  # The length of the length.
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size])
            at += size
        parts.append((tag, der[at : at + length]))
        at += length
    return parts


def _check_readable(path: Path, field: str) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path.
        reason = (error.strerror if isinstance(error, OSError) else None) or "no path"
        raise ConfigError(f"cannot read {path}: {reason}", field) from error


def _refuse_password() -> str:
    # Without this, OpenSSL would ask for one on the terminal.
    raise _Encrypted


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not PEM").lower().replace("_", " ")
