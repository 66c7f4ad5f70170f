"""A root folder that stands for an image: what is mounted into it, and commands that run in it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The host's, which may know more authorities than a fresh root.
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_ENTER = [sys.executable, str(Path(__file__).parent), "--enter"]


@dataclass
class Stage:
    """A stage of the Dockerfile: a root folder and what the instructions have set."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    folder: str = "/"
    user: str = "0"
    health: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def expanded(self, text: str) -> str:
        """With `$NAME` and `${NAME}` replaced, as in every instruction but RUN."""
        known = {**self.variables, **self.environment}
        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: known.get(m[1] or m[2], ""), text)


def inside(root: Path, path: str) -> Path:
    """A path of the image on the host."""
    return root / path.lstrip("/")


def made(folder: Path) -> Path:
    """The folder, which exists now."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def mount_into(root: Path, folders: Sequence[str]) -> None:
    """The kernel's file systems, the resolver, certificates and mounts; they go with our mount namespace."""
    subprocess.run(["mount", "--bind", str(root), str(root)], check=True)
    subprocess.run(["mount", "--rbind", "/dev", str(made(root / "dev"))], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", str(made(root / "proc"))], check=True)
    shutil.copy2("/etc/resolv.conf", root / "etc/resolv.conf")
    if CERTIFICATES.exists():
        made(inside(root, str(CERTIFICATES.parent)))
        shutil.copy2(CERTIFICATES, inside(root, str(CERTIFICATES)))
    for folder in folders:
        subprocess.run(["mount", "--bind", "-o", "ro", folder, str(made(inside(root, folder)))], check=True)


def plan_of(stage: Stage, arguments: Sequence[str], *, isolated: bool = False) -> str:
    """What `become` has to know to run a command in a stage's root, as its user."""
    variables = stage.variables if stage.user == "0" else {}
    return json.dumps(
        {
            "root": str(stage.root),
            "folder": stage.folder,
            "user": int(stage.user),
            "environment": {**variables, **stage.environment},
            "arguments": list(arguments),
            "isolated": isolated,
        }
    )


def launch(stage: Stage, arguments: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
    """Start a command as a container would: PID 1 of its own, and here without a network."""
    unshare = ["unshare", "--pid", "--net", "--mount", "--fork", "--kill-child"]
    return subprocess.Popen([*unshare, *_ENTER, plan_of(stage, arguments, isolated=True)], **popen)


def enter(
    stage: Stage, arguments: Sequence[str], *, beside: int | None = None, **run: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command in a stage's root to its end.

    Args:
        stage: whose root, user and environment.
        arguments: the command.
        beside: a process whose network and processes the command shall see.
        run: for `subprocess.run`.
    """
    join = ["nsenter", "--target", str(beside), "--net", "--pid", "--mount"] if beside else []
    return subprocess.run([*join, *_ENTER, plan_of(stage, arguments)], check=False, **run)


def become(plan: Mapping[str, Any]) -> None:
    """Turn this process into the plan's command."""
    if plan["isolated"]:
        with socket.socket() as loopback:  # Up: what `ip link set lo up` does.
            up = struct.pack("16sh14s", b"lo", 0x1, b"")
            fcntl.ioctl(loopback, 0x8914, up)  # SIOCSIFFLAGS
        subprocess.run(["mount", "-t", "proc", "proc", f"{plan['root']}/proc"], check=True)
    os.chroot(plan["root"])
    os.chdir(plan["folder"])
    if plan["user"]:
        os.setgroups([])
        os.setgid(plan["user"])
        os.setuid(plan["user"])
    os.execvpe(plan["arguments"][0], plan["arguments"], plan["environment"])
