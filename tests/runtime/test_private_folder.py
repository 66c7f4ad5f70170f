"""A run's folder: its own, gone with it, and cleared away after a run that was killed."""

import multiprocessing
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from serving.runtime.private_folder import LOCK, PREFIX, private_folder, remove_abandoned


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where folders are made; short, as the system's own."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_it_is_private_and_gone_after_the_run(parent: Path) -> None:
    """Whether the run succeeds or not."""
    with private_folder() as folder:
        assert folder.parent == parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "ray").mkdir()
    with pytest.raises(ZeroDivisionError), private_folder():
        raise ZeroDivisionError
    assert list(parent.iterdir()) == []


def test_a_run_that_lives_keeps_its_folder(parent: Path) -> None:
    """However many start beside it."""
    with private_folder() as one, private_folder() as other:
        remove_abandoned(parent)
        assert one.is_dir()
        assert other.is_dir()


def hold(parent: str, ready: Any) -> None:
    """A run in another process."""
    tempfile.tempdir = parent
    with private_folder():
        ready.set()
        while True:
            pass


def test_the_folder_of_a_killed_run_is_removed_by_the_next(parent: Path) -> None:
    """Once its process is gone, and not before."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(str(parent), ready))
    process.start()
    assert ready.wait(60)
    [left] = parent.iterdir()
    remove_abandoned(parent)
    assert left.is_dir()
    process.kill()
    process.join()
    assert left.is_dir()
    with private_folder():
        assert not left.exists()


def test_only_folders_with_a_lock_of_this_user_s_are_touched(parent: Path) -> None:
    """A folder that is being made has none yet; a link may lead anywhere."""
    unfinished, stranger, linked, other = (
        parent / name for name in (f"{PREFIX}new", "stranger", f"{PREFIX}link", f"{PREFIX}file")
    )
    for folder in (unfinished, stranger, linked):
        folder.mkdir()
    (stranger / LOCK).touch()
    (linked / LOCK).symlink_to(stranger / LOCK)
    other.touch()
    remove_abandoned(parent)
    assert all(path.exists() for path in (unfinished, stranger, linked, other))


def test_a_parent_too_long_for_sockets_is_passed_over(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's sockets would not fit."""
    long = parent / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_folder() as folder:
        assert folder.parent == parent.parent
