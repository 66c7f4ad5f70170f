"""A tokens file that changes while the server runs: callers come and go without a restart."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from serving.errors import ConfigError
from serving.gateway.auth import Authenticator, load_tokens

logger = logging.getLogger("halftone.gateway")

#: A change is in force after two of these at most, plus what a look takes.
LOOK_INTERVAL_S = 0.5

#: Device, inode, size in bytes, time of the last change in ns.
_Stamp = tuple[int, int, int, int]


class TokenWatch:
    """An authenticator that follows its file.

    A changed file that is wrong, or has gone, leaves the tokens before it valid: nobody is locked
    out by a slip of the pen. That is one line in the log, and no token in it.
    """

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: as `load_tokens` does.
        """
        self._path = path
        # Before it is read: a change in between is then seen as one.
        self._taken = self._seen = _stamp(path)
        self.authenticator = Authenticator(load_tokens(path))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.look()

    def look(self) -> None:
        """Take the file over if it has changed, and stood still since the last look.

        One that is being written could hold half a token, which would be a shorter one.
        """
        stamp = _stamp(self._path)
        has_settled = stamp == self._seen
        self._seen = stamp
        if stamp == self._taken or not has_settled:
            return
        self._taken = stamp
        try:
            tokens = load_tokens(self._path)
        except ConfigError as error:
            logger.warning("the tokens before stay valid, for the changed file is refused: %s", error)
            return
        self.authenticator.replace(tokens)
        logger.info("the tokens file has changed, and is in force: %d tokens", len(tokens))


def _stamp(path: Path) -> _Stamp | None:
    """What tells one state of a file from another; None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in the path.
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
