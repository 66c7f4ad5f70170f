"""A model that takes its time to load, so that tests can look while it has no replica."""

import time

import torch

SECONDS_TO_BUILD = 10.0


def build() -> torch.nn.Module:
    """The module that the configuration names."""
    time.sleep(SECONDS_TO_BUILD)
    return torch.nn.Identity()
