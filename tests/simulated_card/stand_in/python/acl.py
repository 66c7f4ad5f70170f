"""Stands for CANN's pyACL, of which Ray asks how many cards the machine has and what they are."""

import os
from types import SimpleNamespace

rt = SimpleNamespace(get_device_count=lambda: (int(os.environ.get("FAKE_NPU_COUNT", "2")), 0))


def get_soc_name() -> str:
    """As in CANN."""
    return os.environ.get("FAKE_NPU_SOC", "Ascend910A")
