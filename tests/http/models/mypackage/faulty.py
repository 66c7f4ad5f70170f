"""A model whose code does what no model should, when a row begins with the number for it."""

import ctypes
import os
import signal
import tempfile
import time
from pathlib import Path

import torch

DEADLY, RAISES, EXITS, HANGS, HANGS_HARD = 666.0, 13.0, 14.0, 777.0, 778.0
#: The next `HANGS` or `HANGS_HARD` hangs while this file is there, and takes it away: the batch
#: that is sent once more finds a model that works.
HANG_ONCE = Path(tempfile.gettempdir()) / "hang-once"


class Faulty(torch.nn.Module):
    """Returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 2]
        first = set(x[:, 0].tolist())
        if DEADLY in first:
            os.kill(os.getpid(), signal.SIGKILL)
        if RAISES in first:
            raise RuntimeError("thirteen")
        if EXITS in first:
            raise SystemExit(14)
        if first & {HANGS, HANGS_HARD} and HANG_ONCE.exists():
            HANG_ONCE.unlink()
            if HANGS_HARD in first:
                ctypes.PyDLL(None).sleep(3600)  # Keeps the interpreter's lock.
            time.sleep(3600)
        return x * 1


def build() -> torch.nn.Module:
    """The module that the configuration names."""
    return Faulty()


def raises() -> torch.nn.Module:
    """Cannot be built."""
    raise RuntimeError("no such layer")


def exits() -> torch.nn.Module:
    """Ends the process that builds it, or tries to."""
    raise SystemExit("enough")


def returns_none() -> None:
    """Forgot to return."""
