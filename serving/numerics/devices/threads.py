"""How many cores of the host an operator may use."""

from __future__ import annotations

import torch

from serving.errors import ConfigError


def set_threads(threads: int) -> dict[str, str]:
    """Limit torch's threads on the host, and read the limits back.

    Raises:
        ConfigError: `threads` is below 1.
    """
    if threads < 1:
        raise ConfigError(f"a tier needs at least 1 thread, not {threads}", "threads")
    torch.set_num_threads(threads)
    # torch refuses a change once operators have run side by side; what is read back counts.
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError as error:
            if "set number of interop threads" not in str(error):
                raise
    return read_threads()


def read_threads() -> dict[str, str]:
    """The limits as they are."""
    return {
        "num_threads": str(torch.get_num_threads()),
        "num_interop_threads": str(torch.get_num_interop_threads()),
    }
