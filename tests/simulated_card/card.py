"""A simulated card (stub CANN): the real torch_npu over stand-ins for CANN's libraries.

Nothing that runs on it says anything of a real card's accuracy, speed or operators. It shows what
torch_npu makes of our calls, and what we make of what torch_npu returns.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
SOURCES = HERE / "stand_in"
LOCK = REPOSITORY / "requirements" / "torch_npu.lock"
#: Outside the virtual environment, where an installed torch_npu would break `import torch`.
FOLDER = REPOSITORY / "build" / "simulated-card"

SATURATING = "Ascend910A"
IEEE = "Ascend910B1"


class CardUnavailable(Exception):
    """The simulated card cannot be set up here."""


@dataclass(frozen=True)
class SimulatedCard:
    """Where torch_npu and the stand-ins are."""

    site: Path
    libraries: Path

    def environment(
        self, soc: str, *, cards: int = 1, memory_mb: int = 4096, task_queue: bool = True
    ) -> dict[str, str]:
        """Variables for a process that is to see `cards` cards of a kind.

        Args:
            soc: the name that the card gives.
            cards: how many the machine has.
            memory_mb: of each card.
            task_queue: torch_npu's default, operators queued to a thread of its own.
        """
        inherited = {name: value for name, value in os.environ.items() if name != "ASCEND_RT_VISIBLE_DEVICES"}
        return {
            **inherited,
            "FAKE_NPU_SOC": soc,
            "FAKE_NPU_COUNT": str(cards),
            "FAKE_NPU_HBM_MB": str(memory_mb),
            "LD_LIBRARY_PATH": str(self.libraries),
            "PYTHONPATH": os.pathsep.join(map(str, (self.site, SOURCES / "python"))),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TASK_QUEUE_ENABLE": "1" if task_queue else "0",
        }


def set_up() -> SimulatedCard:
    """Install torch_npu and build the stand-ins, or take what an earlier run has made of the same.

    Raises:
        CardUnavailable: there is no compiler, no torch_npu for this Python, or the build fails.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    card = SimulatedCard(FOLDER / "site", FOLDER / "lib")
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make(FOLDER / "site.made", _digest(LOCK), lambda: _install(card.site))
        inputs = [path for path in sorted(SOURCES.iterdir()) if path.is_file()]
        _make(FOLDER / "lib.made", _digest(LOCK, *inputs), lambda: _build(card))
    return card


def _make(stamp: Path, digest: str, make: Callable[[], None]) -> None:
    """Call `make` unless it was called for the same inputs before."""
    if stamp.exists() and stamp.read_text("ascii") == digest:
        return
    stamp.unlink(missing_ok=True)
    make()
    stamp.write_text(digest, "ascii")


def _digest(*inputs: Path) -> str:
    """Of the files, and of the Python and torch that the result is for."""
    digest = hashlib.sha256(f"{sys.version} {torch.__version__} {sys.prefix}".encode())
    for path in inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _install(site: Path) -> None:
    shutil.rmtree(site, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    what = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(LOCK)]
    _run([*pip, *what, "--target", str(site)])


def _build(card: SimulatedCard) -> None:
    missing = [tool for tool in ("g++", "gcc", "nm") if shutil.which(tool) is None]
    if missing:
        raise CardUnavailable(f"{', '.join(missing)} not found; it takes a C++ compiler and binutils")
    shutil.rmtree(card.libraries, ignore_errors=True)
    torch_site = Path(torch.__file__).parent.parent
    _run([str(SOURCES / "build.sh"), str(torch_site), str(card.site), str(card.libraries)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reasons = [line for line in lines if "error" in line.lower()] or lines[-1:]
        raise CardUnavailable(f"{Path(command[0]).name} failed: {' | '.join(reasons[:3])}")
