"""Bearer tokens: who may call."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from serving.errors import ConfigError, Unauthorized

MIN_TOKEN_LENGTH = 16
MAX_TOKENS_BYTES = 1 << 20


class Authenticator:
    """Checks `Authorization: Bearer`. Without tokens, everybody may call."""

    def __init__(self, tokens: dict[str, str] | None = None) -> None:
        """`tokens`: name -> token; None when the server asks for none."""
        self._digests = None if tokens is None else _digests(tokens)

    def replace(self, tokens: dict[str, str]) -> None:
        """From now on these are the tokens: name -> token."""
        self._digests = _digests(tokens)

    def check(self, authorization: list[str]) -> str | None:
        """The name of the token in a request's `Authorization` headers; None where none is asked for.

        Raises:
            Unauthorized: no header, several, another scheme, or an unknown token.
        """
        if self._digests is None:
            return None
        caller = self._caller(authorization, self._digests)
        if caller is None:
            raise Unauthorized("a valid bearer token is needed")
        return caller

    def accepts(self, authorization: list[str]) -> bool:
        """Whether these `Authorization` headers are those of a known caller."""
        return self._digests is None or self._caller(authorization, self._digests) is not None

    @staticmethod
    def _caller(authorization: list[str], known: dict[str, bytes]) -> str | None:
        """Every known token is compared, in constant time, so that timing tells nothing."""
        scheme, _, token = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
        digest = _digest(token.strip())
        matches = [name for name, own in known.items() if hmac.compare_digest(digest, own)]
        return matches[0] if matches and scheme.lower() == "bearer" else None


def _digests(tokens: dict[str, str]) -> dict[str, bytes]:
    return {name: _digest(token) for name, token in tokens.items()}


def _digest(token: str) -> bytes:
    # Whatever a header holds has a digest: a lone surrogate is no fault of the server's.
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def load_tokens(path: Path) -> dict[str, str]:
    """Read a tokens file: a line each, `name token`; empty lines and `#` comments are skipped.

    Raises:
        ConfigError: it cannot be read, is larger than `MAX_TOKENS_BYTES`, a line is malformed, a
            token is short, or a name or a token is given twice. The message never holds a token.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKENS_BYTES + 1)
        lines = content.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path.
        # Not the error's own words: those of a decoder quote what they could not decode.
        reason = (error.strerror if isinstance(error, OSError) else None) or "not UTF-8, or no path"
        raise ConfigError(f"cannot read {path}: {reason}", "server.tokens_file") from error
    if len(content) > MAX_TOKENS_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_TOKENS_BYTES} bytes", "server.tokens_file")
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}, line {number}"
        if len(words) != 2:  # noqa: PLR2004  A name and a token.
            raise ConfigError(f"{where}: a line is `name token`", "server.tokens_file")
        name, token = words
        if len(token) < MIN_TOKEN_LENGTH:
            raise ConfigError(
                f"{where}: a token has at least {MIN_TOKEN_LENGTH} characters", "server.tokens_file"
            )
        if name in tokens:
            raise ConfigError(f"{where}: the name {name!r} stands twice", "server.tokens_file")
        if token in tokens.values():
            raise ConfigError(f"{where}: another name has the same token", "server.tokens_file")
        tokens[name] = token
    if not tokens:
        raise ConfigError(f"{path} holds no token", "server.tokens_file")
    return tokens
