"""Bearer tokens: who may call."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from serving.errors import ConfigError, Unauthorized

MIN_TOKEN_LENGTH = 16


class Authenticator:
    """Checks `Authorization: Bearer`. Without tokens, everybody may call."""

    def __init__(self, tokens: dict[str, str] | None = None) -> None:
        """`tokens`: name -> token; None when the server asks for none."""
        self._digests = None if tokens is None else [_digest(token) for token in tokens.values()]

    def check(self, authorization: list[str]) -> None:
        """Check a request's `Authorization` headers.

        Raises:
            Unauthorized: no header, several, another scheme, or an unknown token.
        """
        if self._digests is not None and not self.accepts(authorization):
            raise Unauthorized("a valid bearer token is needed")

    def accepts(self, authorization: list[str]) -> bool:
        """Whether these `Authorization` headers are those of a known caller.

        Every known token is compared, in constant time, so that timing tells nothing.
        """
        if self._digests is None:
            return True
        scheme, _, token = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
        digest = _digest(token.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(token: str) -> bytes:
    # Whatever a header holds has a digest: a lone surrogate is no fault of the server's.
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def load_tokens(path: Path) -> dict[str, str]:
    """Read a tokens file: a line each, `name token`; empty lines and `#` comments are skipped.

    Raises:
        ConfigError: it cannot be read, a line is malformed, a token is short, or a name is
            given twice. The message never holds a token.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path.
        raise ConfigError(f"cannot read {path}: {error}", "server.tokens_file") from error
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
        tokens[name] = token
    if not tokens:
        raise ConfigError(f"{path} holds no token", "server.tokens_file")
    return tokens
