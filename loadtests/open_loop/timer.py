"""`Timer`: wakes an event loop at a moment, to microseconds.

asyncio's and uvloop's own timers count whole milliseconds: too coarse for thousands of requests per
second. Linux has timers that are file descriptors; Python wraps them from 3.13 on.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE = 1
_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Timer:
    """Calls back on the running loop once for each time that it is set.

    Raises:
        OSError: the system has no such timers.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._setting = _Setting()
        self._reference = ctypes.byref(self._setting)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._expired)

    def set(self, at_s: float) -> None:
        """Call at that `time.monotonic()`; at once where it has passed."""
        nanoseconds = max(1, int(at_s * _NS_PER_S))
        first = self._setting.first
        first.seconds, first.nanoseconds = divmod(nanoseconds, _NS_PER_S)
        if self._libc.timerfd_settime(self._file, _ABSOLUTE, self._reference, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Never call again."""
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _expired(self) -> None:
        os.read(self._file, 8)
        self._call()
