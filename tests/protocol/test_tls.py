"""Certificates and keys: which files are refused, by which field, and whom a client trusts."""

import http.client
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from certificates import Pair, issue
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256

from serving.errors import ConfigError
from serving.protocol.tls import leaf_certificate, server_context, trusting_context


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A good one."""
    return issue(tmp_path / "good", "halftone.test")


def refused(certificate: Path, key: Path) -> ConfigError:
    """Why these files are refused; in one line, without a word of the key's."""
    with pytest.raises(ConfigError) as caught:
        server_context(certificate, key)
    assert "\n" not in str(caught.value)
    assert "PRIVATE" not in str(caught.value)
    return caught.value


def test_a_certificate_and_its_key_pass(pair: Pair) -> None:
    """A chain, and a certificate that signed itself."""
    server_context(pair.certificate, pair.key)


def test_another_key_is_refused(pair: Pair, tmp_path: Path) -> None:
    """Whose certificate it is would be known only at the first connection."""
    error = refused(pair.certificate, issue(tmp_path / "other", "halftone.test").key)
    assert error.path == "server.tls_key"
    assert "is not the key of" in str(error)


def test_an_encrypted_key_is_refused(pair: Pair) -> None:
    """Nobody sits at the terminal to be asked."""
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"password")
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    )
    error = refused(pair.certificate, pair.key)
    assert error.path == "server.tls_key"
    assert "is encrypted" in str(error)


@pytest.mark.parametrize("content", [b"", b"not PEM", b"-----BEGIN PRIVATE KEY-----\nAAAA\n", None])
def test_a_file_that_is_no_key_is_refused(pair: Pair, content: bytes | None) -> None:
    """The certificate twice, too."""
    pair.key.write_bytes(pair.certificate.read_bytes() if content is None else content)
    error = refused(pair.certificate, pair.key)
    assert error.path == "server.tls_key"
    assert "holds no private key in PEM" in str(error)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not PEM",
        b"-----BEGIN CERTIFICATE-----\n\xff\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
        None,
    ],
)
def test_a_file_that_is_no_certificate_is_refused(pair: Pair, content: bytes | None) -> None:
    """The key twice, too: its content is not shown."""
    pair.certificate.write_bytes(pair.key.read_bytes() if content is None else content)
    assert refused(pair.certificate, pair.key).path == "server.tls_certificate"


@pytest.mark.parametrize("name", ["gone", ".", "with\0nul"])
def test_files_that_cannot_be_read_are_refused(pair: Pair, tmp_path: Path, name: str) -> None:
    """By their fields."""
    for files, field in (
        ((tmp_path / name, pair.key), "certificate"),
        ((pair.certificate, tmp_path / name), "key"),
    ):
        error = refused(*files)
        assert error.path == f"server.tls_{field}"
        assert "cannot read" in str(error)


def self_signed(pair: Pair, key: Any) -> None:
    """Write a certificate for the key, and the key, over a pair."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "halftone.test")])
    builder = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime.now(UTC))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
    )
    own_hash = isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    signed = builder.sign(key, None if own_hash else SHA256())
    pair.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


USABLE: list[Callable[[], Any]] = [
    lambda: rsa.generate_private_key(65537, 2048),
    lambda: ec.generate_private_key(ec.SECP256R1()),
    lambda: ec.generate_private_key(ec.SECP384R1()),
    lambda: ec.generate_private_key(ec.SECP521R1()),
    ed25519.Ed25519PrivateKey.generate,
    ed448.Ed448PrivateKey.generate,
]
UNUSABLE: list[Callable[[], Any]] = [
    lambda: rsa.generate_private_key(65537, 1024),  # noqa: S505  Too few bits, on purpose.
    lambda: ec.generate_private_key(ec.SECP256K1()),
]


@pytest.mark.parametrize("make", USABLE, ids=["rsa-2048", "p-256", "p-384", "p-521", "ed25519", "ed448"])
def test_keys_that_the_server_signs_with_pass(pair: Pair, make: Callable[[], Any]) -> None:
    """And with them it does speak TLS."""
    self_signed(pair, make())
    server_context(pair.certificate, pair.key)
    with child(pair) as port:
        assert answers(pair, port)


@pytest.mark.parametrize("make", UNUSABLE, ids=["rsa-1024", "secp256k1"])
def test_keys_that_no_client_takes_are_refused(pair: Pair, make: Callable[[], Any]) -> None:
    """By the certificate that has them, before anybody tries."""
    self_signed(pair, make())
    error = refused(pair.certificate, pair.key)
    assert error.path == "server.tls_certificate"


CHILD = """
import asyncio, sys
from pathlib import Path
from serving.protocol.http import Response
from serving.protocol.http_app import HttpApp
from serving.protocol.server import EmbeddedServer

async def handle(request):
    return Response(200)

async def main():
    app = HttpApp(handle, refuse=lambda error, headers: Response(error.status), max_body_bytes=1000)
    certificate, key = map(Path, sys.argv[1:])
    server = EmbeddedServer(app, "127.0.0.1", 0, tls_certificate=certificate, tls_key=key)
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(5)

asyncio.run(main())
"""


@contextmanager
def child(pair: Pair) -> Iterator[int]:
    """A server with that pair, in a process of its own; its port."""
    command = [sys.executable, "-c", CHILD, str(pair.certificate), str(pair.key)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield int(process.stdout.readline())
        process.communicate()
    assert process.returncode == 0


def answers(pair: Pair, port: int) -> bool:
    """Whether a request over TLS has a reply."""
    context = trusting_context(pair.certificate)
    context.check_hostname = False
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
    connection.request("GET", "/")
    status = connection.getresponse().status
    connection.close()
    return status == 200


def test_the_leaf_is_the_first_of_the_chain(pair: Pair) -> None:
    """What a peer shows, not what signed it."""
    chain = pair.certificate.read_bytes() + pair.ca.read_bytes()
    leaf = leaf_certificate(pair.certificate)
    pair.certificate.write_bytes(b"a comment\n" + chain)
    assert leaf_certificate(pair.certificate) == leaf != leaf_certificate(pair.ca)


def shakes_hands(pair: Pair, context: ssl.SSLContext, name: str) -> bool:
    """Whether a client of that context accepts a server with that pair."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pair.certificate, pair.key)
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(far, server_side=True).close()
        except OSError:
            far.close()  # The client refused it.

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        context.wrap_socket(near, server_hostname=name).close()
    except ssl.SSLCertVerificationError:
        return False
    finally:
        near.close()
        serving.join()
    return True


def test_a_certificate_is_trusted_for_itself_or_its_authority(pair: Pair, tmp_path: Path) -> None:
    """And no other, nor under another name."""
    other = issue(tmp_path / "other", "halftone.test")
    for trusted in (pair.certificate, pair.ca):
        assert shakes_hands(pair, trusting_context(trusted), "halftone.test")
        assert not shakes_hands(pair, trusting_context(trusted), "elsewhere.test")
        assert not shakes_hands(other, trusting_context(trusted), "halftone.test")
