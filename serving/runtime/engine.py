"""The engine of a tier replica: the converted model on its device. Knows torch, not ray.

All methods run on the replica's one device thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import Self

import numpy as np
import torch

from serving.config import TierConfig
from serving.errors import ConfigError, DeviceOutOfMemory, ModelError, PrecisionUnavailable, RequestError
from serving.gateway.tier_client import OVERFLOW_FLAGS, BatchResult, TierDescription
from serving.models.programs import ProgramFile
from serving.models.resolve import open_source
from serving.models.source import ModelSource
from serving.numerics.answers import REPEAT_TOLERANCE, relative_l2
from serving.numerics.conversion import convert
from serving.numerics.devices import Device, open_device
from serving.numerics.graphs import GraphedPass, graphed
from serving.numerics.guard import GUARDED_KINDS, Guard
from serving.numerics.operator_audit import Departure, admit_model, departures, name_with
from serving.numerics.precision import PrecisionSpec
from serving.numerics.probe import Attestation, admit, attest, keeps_name
from serving.numerics.tier_module import TierModule
from serving.runtime.buckets import cycled_rows, padded_to_bucket
from serving.runtime.outputs import by_order, checked_output
from serving.runtime.tier_plan import TierPlan
from serving.runtime.weights import build_module, load_weights
from serving.tensors import Tensors, row_count, slice_rows

logger = logging.getLogger("halftone.tier")


@dataclass(slots=True)
class Engine:
    """A loaded tier."""

    source: ModelSource
    spec: PrecisionSpec
    device: Device
    module: TierModule
    #: What was measured before the first batch.
    loaded: TierDescription
    #: The model's examples, preprocessed, and what they gave at start.
    example: Tensors
    known_answer: Tensors
    #: Numbers of rows that batches are padded to, ascending; none: any number is computed.
    buckets: tuple[int, ...] = ()
    #: The forward pass through the device's graphs, where that is configured.
    graphs: GraphedPass | None = None
    #: Flags rows that overflowed; None where no format of the tier can.
    guard: Guard | None = None
    #: Whether it computes less precisely than the tier's name says, which the configuration accepts.
    is_degraded: bool = False

    @classmethod
    def load(cls, plan: TierPlan, source: ModelSource) -> Self:
        """Load, attest, convert and warm up.

        Raises:
            ConfigError: the device, the weights or the conversion is refused.
            PrecisionUnavailable: the device cannot honour the tier, or the probe measured less, or
                the model's own code departs from the tier's arithmetic.
            ModelError: the model does not run on its own examples.
        """
        config = plan.config
        spec = PrecisionSpec(
            kind=plan.kind,
            native=config.native,
            keep_fp32=config.keep_fp32,
            on_weight_loss=config.on_weight_loss,
        )
        device = open_device(
            plan.device, plan.threads, plan.card, tier=plan.kind, accept_degraded=config.accept_degraded
        )
        attestation = attest(spec, device)
        effective = admit(spec, device, attestation, accept_degraded=config.accept_degraded)
        module = build_module(source)
        if plan.model.weights is not None and not isinstance(source, ProgramFile):
            load_weights(module, plan.model.weights, plan.model.sha256)
        example = source.preprocess(source.examples())
        with device.running():
            converted = convert(module, spec, device, device.to_device(list(example.values())))
        engine = cls(
            source,
            spec,
            device,
            converted,
            _description(device, converted, attestation, effective),
            example,
            {},
        )
        engine._set_guard(plan)
        engine._make_static(config, attestation)
        engine.known_answer = engine.repeatable_answer()
        found = engine.departures()
        if found:
            logger.warning("the model departs from the tier's arithmetic: %s", "; ".join(map(str, found)))
        effective = admit_model(effective, found, accept_degraded=config.accept_degraded)
        engine.is_degraded = bool(found) or not keeps_name(spec, device, attestation)
        engine.loaded = replace(engine.loaded, effective=effective)
        # The model's code has run by now, and may have lowered what the probe had measured.
        if reason := engine.altered():
            raise PrecisionUnavailable(
                f"{spec.kind} was asked for, but the model's own code altered it: {reason}"
            )
        return engine

    @property
    def description(self) -> TierDescription:
        """What the tier is; `switches` also say whether it still replays graphs, and its buckets."""
        if not self.buckets:
            return self.loaded
        static = {"buckets": ", ".join(map(str, self.buckets))}
        if self.graphs is not None:
            static["graphs"] = self.graphs.status
        return replace(self.loaded, switches={**self.loaded.switches, **static})

    def _make_static(self, config: TierConfig, attestation: Attestation) -> None:
        """Set the buckets, and capture a graph for each from the examples' rows.

        Raises:
            ConfigError: graphs are configured, and the device has none.
        """
        self.buckets = config.batching.bucket_rows
        if self.buckets:
            # The known answer goes the way of requests, which fit the largest bucket.
            self.example = slice_rows(self.example, 0, self.buckets[-1])
        if not config.graphs:
            return
        if not self.device.has_graphs:
            raise ConfigError(f"{self.device.title} has no graphs; leave graphs out", "graphs")
        self.graphs = graphed(self._pass, self.spec, self.device, attestation.effective)
        for rows in self.buckets:
            for start in range(2):  # The second is another batch, with which the graph is checked.
                self.run(cycled_rows(self.example, rows, start))

    def _set_guard(self, plan: TierPlan) -> None:
        """Guard the tier's rows, and learn from two batches where a deep guard finds them."""
        mode = plan.model.guard.mode
        if mode == "off" or plan.kind not in GUARDED_KINDS:
            return
        outputs = self.source.signature.outputs
        self.guard = Guard(self.module, mode, [spec.allow_nonfinite for spec in outputs])
        sizes = row_count(self.example), row_count(self.example) + 1
        with self.device.running():
            self.guard.learn(
                [self.device.to_device(list(cycled_rows(self.example, rows).values())) for rows in sizes]
            )

    def _pass(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The outputs, in the signature's order; with a guard, the rows' flags behind them."""
        specs = self.source.signature.outputs
        if self.guard is None:
            return by_order(self.module(*inputs), specs)
        return self.guard.run(inputs, lambda returned: by_order(returned, specs))

    def run(self, batch: Tensors) -> BatchResult:
        """Compute one batch; one that does not fit in the device's memory, in halves.

        Args:
            batch: model tensors, each [rows, ...], in the order of the module's arguments.

        Raises:
            ModelError: the model raised, or its outputs are not those of its signature.
            DeviceOutOfMemory: not even one row fits.
            DeviceLost: the device failed; this engine is finished.
        """
        started_s = time.perf_counter()
        rows = row_count(batch)
        try:
            outputs = self._forward(batch, rows)
        except DeviceOutOfMemory:
            if rows == 1:
                raise
            logger.warning("a batch of %d rows did not fit in memory; running it in halves", rows)
            halves = (slice_rows(batch, 0, rows // 2), slice_rows(batch, rows // 2, rows))
            parts = [self.run(half).outputs for half in halves]
            outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return BatchResult(outputs, time.perf_counter() - started_s)

    def _forward(self, batch: Tensors, rows: int) -> Tensors:
        try:
            with self.device.running():
                inputs = self.device.to_device(list(padded_to_bucket(batch, self.buckets).values()))
                tensors = self._pass(*inputs) if self.graphs is None else self.graphs(inputs)
                outputs = self._outputs(tensors, int(inputs[0].shape[0]))
                return slice_rows(outputs, 0, rows)
        except RequestError:
            raise
        except BaseException as error:  # SystemExit and StopIteration too: it is foreign code.
            logger.exception("the model raised")
            raise ModelError("the model raised on this batch; the tier's log has the details") from error

    def repeatable_answer(self) -> Tensors:
        """What the model says to its examples, where it says the same twice; else nothing.

        A model that draws random numbers, keeps state or answers NaN has no known answer.
        """
        first, second = (self.run(self.example).outputs for _ in range(2))
        repeats = all(relative_l2(second[name], first[name]) <= REPEAT_TOLERANCE for name in first)
        if not repeats:
            logger.warning("the model answers its own examples differently each time: no known answer")
        return first if repeats else {}

    def departures(self) -> tuple[Departure, ...]:
        """Operators of the model that compute otherwise than the tier promises, on one row."""
        row = slice_rows(self.example, 0, 1)
        with self.device.running():
            return departures(self.module, self.device.to_device(list(row.values())))

    def altered(self) -> str | None:
        """Whether anything lowered the arithmetic since the start: the model's own code, say.

        Every switch is read again, the probe computes again, and so does the model, watched.
        """
        changed = [
            f"{name} is {value}, was {self.device.switches.get(name)}"
            for name, value in self.device.read_switches().items()
            if value != self.device.switches.get(name)
        ]
        if changed:
            return f"a switch was changed after the start: {'; '.join(changed)}"
        with self.device.running():
            measured = attest(self.spec, self.device).effective
        measured = name_with(measured, self.departures())
        if measured != self.description.effective:
            return f"the probe measures {measured} now; it was {self.description.effective} at the start"
        return None

    def broken(self) -> str | None:
        """Whether the replica computes wrongly: its known answer, again.

        Only a device that failed gives another one: see `repeatable_answer`.
        """
        if not self.device.healthy():
            return f"{self.device.title} no longer computes a known product"
        if not self.known_answer:
            return None
        for name, answer in self.run(self.example).outputs.items():
            distance = relative_l2(answer, self.known_answer[name])
            if not distance <= REPEAT_TOLERANCE:
                return f"the known answer {name} is off by {distance:.1e}"
        return None

    def _outputs(self, tensors: list[torch.Tensor], rows: int) -> Tensors:
        outputs = {
            spec.name: checked_output(spec, self.device.to_host(tensor), rows)
            for spec, tensor in zip(self.source.signature.outputs, tensors, strict=self.guard is None)
        }
        if self.guard is not None:
            outputs[OVERFLOW_FLAGS] = self.device.to_host(tensors[-1])
        return outputs


def _description(
    device: Device, converted: TierModule, attestation: Attestation, effective: str
) -> TierDescription:
    return TierDescription(
        device=device.kind,
        soc=device.title,
        effective=effective,
        kept_fp32=converted.kept_fp32,
        weight_losses=tuple(str(loss) for loss in converted.weight_losses),
        switches=dict(device.switches),
        measured={name: str(value) for name, value in asdict(attestation).items()},
    )


def open_plan_source(plan: TierPlan) -> ModelSource:
    """The plan's model source; a program is given its file."""
    source = open_source(plan.model.source, plan.model.declared_signature())
    if isinstance(source, ProgramFile):
        source.path, source.sha256 = plan.model.weights, plan.model.sha256
    return source
