"""A tier's forward pass through a device's graphs, one per shape of the inputs.

A graph is believed once its replay has given the eager pass's answer to other inputs than those
it was captured with: a model may have put a value of its inputs into its Python code, or draw
random numbers. Whatever speaks against graphs ends them for good, and the tier serves without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from serving.errors import DeviceOutOfMemory
from serving.numerics.answers import repeats
from serving.numerics.conversion import convert
from serving.numerics.devices.device import Device
from serving.numerics.devices.graphs import CaptureFailed, Graph, Pass
from serving.numerics.precision import PrecisionSpec
from serving.numerics.probe import effective_precision
from serving.tensors import Array

logger = logging.getLogger("halftone.tier")

#: Graphs of a tier, each with memory of its own. Further shapes run without.
MAX_GRAPHS = 32

_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(slots=True)
class _Entry:
    graph: Graph
    #: What it was captured with; None once it is believed.
    captured_with: list[Array] | None


class GraphedPass:
    """A forward pass, replayed where its shapes were captured.

    The first pass of a shape runs eagerly, and is captured then.

    Args:
        forward: model tensors -> outputs, on the device.
        device: where it runs.
        limit: of graphs.
    """

    def __init__(self, forward: Pass, device: Device, *, limit: int = MAX_GRAPHS) -> None:
        self._forward = forward
        self._device = device
        self._limit = limit
        self._entries: dict[_Shapes, _Entry] = {}
        #: Why there are no graphs any more; None while there may be.
        self.off: str | None = None

    @property
    def status(self) -> str:
        """`on`, or `off: ` and the reason."""
        return "on" if self.off is None else f"off: {self.off}"

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The pass's outputs, valid until the next call.

        Raises:
            DeviceLost: the device failed, now or before.
            DeviceOutOfMemory: the pass itself did not fit.
            Exception: whatever the model raises.
        """
        if self.off is not None:
            return self._forward(*inputs)
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
        entry = self._entries.get(shapes)
        if entry is not None:
            return self._replay(entry, inputs)
        if len(self._entries) == self._limit:
            return self._forward(*inputs)
        captured_with = self._on_host(inputs)
        outputs = self._forward(*inputs)
        self._capture(shapes, inputs, captured_with)
        return outputs

    def turn_off(self, reason: str) -> None:
        """Serve without graphs from now on, and say so once."""
        logger.warning("serving without graphs: %s", reason)
        self.off = reason
        self._entries.clear()

    def _capture(self, shapes: _Shapes, inputs: Sequence[torch.Tensor], captured_with: list[Array]) -> None:
        # A graph keeps the switches of its capture for good; the periodic check reads later ones.
        if self._device.read_switches() != self._device.switches:
            return
        try:
            graph = self._device.capture(self._forward, inputs)
        except (CaptureFailed, DeviceOutOfMemory) as error:
            self.turn_off(f"a pass of {_sizes(shapes)} cannot be captured: {error}")
            return
        if self._device.read_switches() != self._device.switches:
            return
        self._entries[shapes] = _Entry(graph, captured_with)
        if len(self._entries) == self._limit:
            logger.warning("%d graphs captured; further shapes run without", self._limit)

    def _replay(self, entry: _Entry, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        known = entry.captured_with
        given = self._on_host(inputs) if known is not None else []
        outputs = entry.graph.replay(inputs)
        if known is None or all(map(np.array_equal, given, known)):
            return outputs
        expected = self._forward(*inputs)
        if all(map(repeats, self._on_host(outputs), self._on_host(expected))):
            entry.captured_with = None
        else:
            self.turn_off("a replayed pass answers otherwise than the pass itself")
        return expected

    def _on_host(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        return [self._device.to_host(tensor) for tensor in tensors]


def graphed(forward: Pass, spec: PrecisionSpec, device: Device, effective: str) -> GraphedPass:
    """A tier's forward pass through graphs, where a replay measures the tier's own precision.

    Args:
        forward: model tensors -> outputs, on the device.
        spec: of the tier.
        device: where it runs.
        effective: what the probe measured of the tier without graphs.

    Raises:
        DeviceLost: the device failed.
    """
    through_graphs = GraphedPass(forward, device)
    try:
        measured = _replayed_precision(spec, device)
    except (CaptureFailed, DeviceOutOfMemory) as error:
        through_graphs.turn_off(f"the probe cannot be captured: {error}")
        return through_graphs
    if measured != effective:
        through_graphs.turn_off(
            f"the probe measures {measured} of a replay, and {effective} of the pass itself"
        )
    return through_graphs


def _replayed_precision(spec: PrecisionSpec, device: Device) -> str:
    """The effective precision of replays, measured as the tier's own is."""
    bare = replace(spec, keep_fp32=())

    def run(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        tier = convert(module, bare, device)

        def replayed(x: torch.Tensor) -> torch.Tensor:
            return device.capture(lambda own: [tier(own)], [x]).replay([x])[0]

        return replayed

    return effective_precision(run, device).effective


def _sizes(shapes: _Shapes) -> str:
    return ", ".join("x".join(map(str, shape)) for shape, _ in shapes)
