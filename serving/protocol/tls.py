"""The server's certificate and key: checked before anything starts, and recognised by its own client."""

from __future__ import annotations

import contextlib
import re
import ssl
from pathlib import Path

from serving.errors import ConfigError

CERTIFICATE_FIELD = "server.tls_certificate"
KEY_FIELD = "server.tls_key"
_FIRST_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)

#: What the library finds too weak at its default level of security.
_WEAK = frozenset({"EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"})


class _Encrypted(Exception):
    """A password was asked for."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """HTTP/1.1 over TLS 1.2 or later, with a certificate and key of which a client has had its way once.

    Args:
        certificate: the chain in PEM, the server's own certificate first.
        key: its private key in PEM.

    Raises:
        ConfigError: with the field's path: one of them cannot be read, is no such file, is
            encrypted, they do not belong together, or no client could speak TLS with them.
    """
    leaf_certificate(certificate)
    _check_readable(key, KEY_FIELD)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_verify_locations(cafile=certificate)
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate}: {_reason(error)}", CERTIFICATE_FIELD) from error
    try:
        context.load_cert_chain(certificate, key, _refuse_password)
    except _Encrypted as error:
        raise ConfigError(f"{key} is encrypted, and nobody is asked for its password", KEY_FIELD) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key} is not the key of {certificate}", KEY_FIELD) from error
        if error.reason in _WEAK:
            raise ConfigError(f"{certificate}: {_reason(error)}", CERTIFICATE_FIELD) from error
        raise ConfigError(f"{key} holds no private key in PEM: {_reason(error)}", KEY_FIELD) from error
    try:
        _shake_hands(context)
    except ssl.SSLError as error:
        message = f"no client can speak TLS with {certificate}: {_reason(error)}"
        raise ConfigError(message, CERTIFICATE_FIELD) from error
    return context


def _shake_hands(context: ssl.SSLContext) -> None:
    """Have a client of the same library connect, in memory: keys that load may still sign nothing."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    # One flight each way, and the client's last one.
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()


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
