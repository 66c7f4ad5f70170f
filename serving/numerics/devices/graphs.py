"""Passes captured as a device's graph: every operator's call recorded once, then replayed at once.

A replay computes on the same memory each time: inputs are copied into the capture's own, and
outputs are overwritten by the next replay. It keeps the precision switches of its capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from serving.errors import DeviceLost

if TYPE_CHECKING:
    from serving.numerics.devices.device import Device

#: A forward pass: the model's tensors -> its outputs, all on the device.
Pass = Callable[..., list[torch.Tensor]]

_LAST_COUNT = 1 << 30


class CaptureFailed(Exception):
    """The pass cannot be captured; the device goes on, and the pass runs as it did before."""


class Graph(Protocol):
    """A captured pass."""

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute the pass on other inputs, of the capture's shapes and dtypes.

        The outputs stay valid until the next replay.

        Raises:
            DeviceOutOfMemory: the device goes on.
            DeviceLost: the device failed, now or before, or did not compute.
        """


class Recording(Protocol):
    """What torch and torch_npu call a graph."""

    def replay(self) -> None:
        """Queue all recorded calls on the current stream."""


@dataclass(frozen=True, slots=True)
class Recorder:
    """An empty graph, and the context in which calls are recorded into it."""

    recording: Recording
    context: AbstractContextManager[object]


@dataclass(slots=True)
class CapturedPass:
    """A recording with its memory, and a counter that only a replay counts on.

    A replay that was dropped in silence would leave the outputs of the batch before, which are
    another client's: no outputs leave before the counter has moved.
    """

    device: Device
    recording: Recording
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    #: [1], INT32, on the device; its last recorded operator adds 1 to it.
    counter: torch.Tensor
    _count: int = field(default=0, init=False)

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `Graph.replay`."""
        with self.device.running():
            if self._count == _LAST_COUNT:
                self.counter.zero_()
                self._count = 0
            for own, given in zip(self.inputs, inputs, strict=True):
                own.copy_(given, non_blocking=True)
            self.recording.replay()
        self._count += 1
        if int(self.device.to_host(self.counter)[0]) != self._count:
            self.device.poisoned = True
            raise DeviceLost(f"{self.device.name} did not replay a graph and takes no more work")
        return self.outputs
