"""Obeys a Dockerfile's instructions in plain root folders."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from root import Stage, enter, inside, made, mount_into
from saying import say

#: Instructions that nothing here depends on.
IGNORED = frozenset({"LABEL", "EXPOSE", "STOPSIGNAL"})
REPOSITORY = Path(__file__).resolve().parent.parent.parent


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and argument of each instruction, its lines joined and comments dropped."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (name.upper(), rest.strip())
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


class Builder:
    """Obeys a Dockerfile.

    Args:
        base: the root folder that stands for every base image, and its environment.
        work: where the stages' roots go.
        build_args: values that replace those of ARG.
        mounts: folders of the host to bind into the roots.
    """

    def __init__(self, base: Stage, work: Path, build_args: Mapping[str, str], mounts: Sequence[str]) -> None:
        self._base, self._work = base, work
        self._build_args, self._mounts = build_args, mounts
        self._global = Stage(base.root)
        self._stages: dict[str, Stage] = {}
        self._stage = self._global

    def build(self, text: str) -> Stage:
        """All stages in turn; the last one."""
        for name, rest in instructions(text):
            say(f"{name} {rest}"[:200])
            if name not in IGNORED:
                getattr(self, f"_{name.lower()}")(rest)
        return self._stage

    def _from(self, rest: str) -> None:
        image, _, name = self._global.expanded(rest).partition(" AS ")
        root = self._work / f"stage{len(self._stages)}"
        subprocess.run(["cp", "-a", "--reflink=auto", f"{self._base.root}/.", str(root)], check=True)
        pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        self._stage = Stage(root, environment=dict(self._base.environment))
        self._stage.variables.update(pip)
        self._stages[name or str(len(self._stages))] = self._stage
        mount_into(root, self._mounts)
        say(f"  {image} is replaced by {self._base.root}")

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        value = self._build_args.get(
            name, self._stage.expanded(default) or self._global.variables.get(name, "")
        )
        self._stage.variables[name] = value

    def _env(self, rest: str) -> None:
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            self._stage.environment[name] = self._stage.expanded(value)

    def _shell(self, rest: str) -> None:
        self._stage.shell = json.loads(rest)

    def _workdir(self, rest: str) -> None:
        self._stage.folder = str(Path(self._stage.folder) / self._stage.expanded(rest))
        path = inside(self._stage.root, self._stage.folder)
        path.mkdir(parents=True, exist_ok=True)

    def _user(self, rest: str) -> None:
        self._stage.user = rest

    def _copy(self, rest: str) -> None:
        words = shlex.split(self._stage.expanded(rest))
        stage = next((self._stages[w.partition("=")[2]] for w in words if w.startswith("--from=")), None)
        *sources, target = [word for word in words if not word.startswith("--")]
        to = inside(self._stage.root, str(Path(self._stage.folder) / target))
        for source in sources:
            start = inside(stage.root, source) if stage else REPOSITORY / source
            if stage:
                subprocess.run(["cp", "-a", f"{start}/.", str(made(to))], check=True)
            elif start.is_dir():
                copy_context(start, to)
            else:
                shutil.copy2(start, made(to))

    def _run(self, rest: str) -> None:
        self._stage.variables.setdefault("HOME", "/root")
        done = enter(self._stage, [*self._stage.shell, rest])
        if done.returncode != 0:
            raise SystemExit(f"FAILED with status {done.returncode}: RUN {rest}")

    def _healthcheck(self, rest: str) -> None:
        self._stage.health = json.loads(rest.partition(" CMD ")[2])

    def _entrypoint(self, rest: str) -> None:
        self._stage.entrypoint = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self._stage.command = json.loads(rest)


def copy_context(start: Path, to: Path) -> None:
    """Copy a folder's files, but for those that .dockerignore keeps from the builder."""
    rules = [
        line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and line[0] != "#"
    ]
    for path in sorted(start.rglob("*")):
        if path.is_file() and not ignored(path.relative_to(REPOSITORY), rules):
            target = to / path.relative_to(start)
            shutil.copy2(path, made(target.parent) / target.name)


def ignored(path: Path, rules: Sequence[str]) -> bool:
    """Whether the last rule that matches the path, or a folder that it is in, excludes it."""
    names = [path.as_posix(), *(parent.as_posix() for parent in path.parents if parent.name)]
    found = False
    for rule in rules:
        pattern = rule.lstrip("!").rstrip("/")
        matches = [pattern] if not pattern.startswith("**/") else [pattern, pattern[3:]]
        if any(fnmatch.fnmatchcase(name, match) for name in names for match in matches):
            found = not rule.startswith("!")
    return found
