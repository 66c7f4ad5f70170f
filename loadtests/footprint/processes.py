"""Resident memory of a server's processes, as Linux counts it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def descendants(root: int) -> Iterator[int]:
    """Processes that a process started, and those that they started."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            parents.setdefault(parent, []).append(int(entry.name))
    pending = list(parents.get(root, []))
    while pending:
        found = pending.pop()
        yield found
        pending += parents.get(found, [])


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # It ended meanwhile.


def find(root: int, title: str) -> list[int]:
    """Descendants whose command line contains that text."""
    return [pid for pid in descendants(root) if title in command_line(pid)]


def command_line(pid: int) -> str:
    """As the process last set it; empty where it ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """Now."""
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most since `reset_peak`."""
    return _status(pid, "VmHWM")


def reset_peak(pid: int) -> None:
    """Forget the most so far."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} of {os.uname().nodename} shows no {field}")
