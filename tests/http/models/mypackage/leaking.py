"""A model that leaks all that can leak, in the gateway and in its tier; only ever to be caught."""

import asyncio
import os

import torch

from loadtests.growth.task_count import Watched
from serving.tensors import Tensors

BYTES_PER_BATCH = 128 * 1024


class Hoard(torch.nn.Module):
    """The identity; keeps memory and a descriptor for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 128]
        self.kept.append(bytearray(os.urandom(64) * (BYTES_PER_BATCH // 64)))
        if len(self.kept) % 8 == 0:
            self.kept.append(os.open(os.devnull, os.O_RDONLY))
        return x


class Leaking(Watched):
    """The echo; in the gateway, one more task for every eighth request waits for what never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.waiting: list[asyncio.Task[bool]] = []

    def build(self) -> torch.nn.Module:
        """The module that hoards."""
        return Hoard().eval()

    def batch_key(self, tensors: Tensors) -> object:
        """As usual, and a task."""
        self.requests += 1
        if self.requests % 8 == 0:
            self.waiting.append(asyncio.get_running_loop().create_task(asyncio.Event().wait()))
        return super().batch_key(tensors)
