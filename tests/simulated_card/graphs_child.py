"""Checks of NPU graphs that run in a process which sees a simulated card (stub CANN).

    python graphs_child.py RESULTS.json CHECKS

As `contract_child.py`: CHECKS is `graphs`, or a name in `ALONE`. All but those named for old cards want a
910B1.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import numpy as np
import torch
from contract_child import AI_CORE, distance, npu, on_cpu, opened, raised, vision_rows
from networks import set_fault

from serving.config import ModelConfig
from serving.errors import ConfigError, DeviceLost
from serving.models.minilm import MiniLM
from serving.models.resolve import CallableSource
from serving.models.source import ModelSource
from serving.numerics.conversion import convert
from serving.numerics.devices import CaptureFailed
from serving.numerics.graphs import GraphedPass, graphed
from serving.numerics.precision import Kind, PrecisionSpec
from serving.numerics.probe import attest
from serving.runtime.engine import Engine
from serving.runtime.tier_plan import TierPlan
from serving.tensors import Signature, TensorSpec

SIGNATURE = Signature(
    (TensorSpec("x", "FP32", (-1, networks.CHANNELS, networks.SIDE, networks.SIDE)),),
    (TensorSpec("logits", "FP32", (-1, 10)),),
)
KINDS: tuple[Kind, ...] = ("fp32", "fp16", "mixed", "autocast", "bf16")

CHECKS: dict[str, Callable[[], None]] = {}
ALONE: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check, in the order of this file."""
    CHECKS[function.__name__] = function
    return function


def alone(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check that has a process of its own."""
    ALONE[function.__name__] = function
    return function


def engine_of(source: ModelSource, kind: Kind, *, graphs: bool = True) -> Engine:
    """A loaded tier with buckets of 1, 2 and 4 rows."""
    options = {"graphs": graphs, "batching": {"max_rows": 4, "buckets": "auto"}}
    model = {"name": "m", "source": "a:b", "device": "npu", "tiers": {kind: options}}
    return Engine.load(TierPlan(ModelConfig.model_validate(model), kind, threads=1), source)


def vision_engine(kind: Kind, *, graphs: bool = True) -> Engine:
    """Of `networks.vision`."""
    return engine_of(CallableSource(networks.vision, SIGNATURE, "networks:vision"), kind, graphs=graphs)


def passing(module: torch.nn.Module, device: Any) -> GraphedPass:
    """A module's FP16 pass through graphs."""
    tier = convert(module, PrecisionSpec("fp16"), device)
    return GraphedPass(lambda *inputs: [tier(*inputs)], device)


def answer(graphs: GraphedPass, device: Any, x: np.ndarray) -> np.ndarray:
    """As a tier computes a batch."""
    with device.running():
        found: np.ndarray = device.to_host(graphs(device.to_device([x]))[0])
    return found


@check
def names_and_signatures() -> None:
    """What we call, by the names that we give; beta in torch_npu 2.13.0."""
    assert {"npu_graph", "stream", "capture_error_mode"} <= set(inspect.signature(npu().graph).parameters)
    for method in ("replay", "capture_begin", "capture_end", "reset"):
        assert callable(getattr(npu().NPUGraph, method))


@check
def a_replay_computes_on_other_inputs() -> None:
    """As the pass itself does to the bit, for rows that it was not captured with; the first answer stays."""
    device = opened()
    tier = convert(networks.vision(), PrecisionSpec("fp16"), device)
    graph = device.capture(lambda *inputs: [tier(*inputs)], device.to_device([vision_rows()]))
    kept = []
    for scale in (1, -2, 0.5):
        x = (vision_rows() * scale).astype(np.float32)
        found = device.to_host(graph.replay(device.to_device([x]))[0])
        assert np.array_equal(found, device.to_host(tier(*device.to_device([x]))))
        assert all(not np.array_equal(found, other) for other in kept)
        kept.append(found)


def tier_replays(kind: Kind) -> Callable[[], None]:
    """A whole tier: probe, buckets, known answer and requests through graphs, as without them."""

    def replays() -> None:
        eager = vision_engine(kind, graphs=False)
        wanted = {rows: eager.run({"x": vision_rows(rows)}).outputs["logits"] for rows in (1, 2, 3, 4)}
        engine = vision_engine(kind)
        assert engine.description.switches["graphs"] == "on", engine.description.switches
        assert engine.description.effective == eager.description.effective
        passes = len(_passes_of(engine))
        for rows in (1, 2, 3, 4):
            found = engine.run({"x": vision_rows(rows)}).outputs["logits"]
            assert found.shape == (rows, 10)
            assert np.array_equal(found, wanted[rows]), kind
        assert engine.broken() is None
        assert engine.altered() is None
        assert len(_passes_of(engine)) == passes + 1, "only the audit of operators runs the model itself"
        if kind == "fp32":
            assert np.array_equal(wanted[4], on_cpu(networks.vision(), vision_rows(4)))

    replays.__name__ = f"tier_replays_{kind}"
    return replays


def _passes_of(engine: Engine) -> list[int]:
    """Rows of every pass that the model's Python code has run, noted from the first call on."""
    module = engine.module.module
    if "passes" not in module.__dict__:
        module.__dict__["passes"] = []
        forward = module.forward

        def noted(x: torch.Tensor) -> torch.Tensor:
            module.__dict__["passes"].append(len(x))
            return forward(x)

        module.__dict__["forward"] = noted
    return list(module.__dict__["passes"])


for _kind in KINDS:
    check(tier_replays(_kind))


@check
def the_embedded_text_model_replays() -> None:
    """A transformer with masks and embeddings, at FP16: as it answers without graphs."""
    source = MiniLM()
    eager, engine = (engine_of(source, "fp16", graphs=graphs) for graphs in (False, True))
    assert engine.description.switches["graphs"] == "on", engine.description.switches
    for rows in (1, 2):
        batch = {name: array[-rows:] for name, array in eager.example.items()}
        for name, found in engine.run(batch).outputs.items():
            assert np.array_equal(found, eager.run(batch).outputs[name])


@check
def a_model_that_waits_for_a_value_runs_without_graphs() -> None:
    """The runtime refuses; the device goes on, the answers are right, and the reason is told."""

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    device = opened()
    graphs = passing(Waits(), device)
    for value in (1, 2, 3):
        assert (answer(graphs, device, np.full((2, 1), value, np.float32)) == 2 * value**2).all()
    assert graphs.status.startswith("off: a pass of 2x1 cannot be captured: "), graphs.status
    assert "107030" in graphs.status, graphs.status
    assert device.healthy()


@check
def a_value_in_the_models_code_is_found() -> None:
    """The capture would keep it for good."""

    class Counts(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    device = opened()
    network = Counts()
    graphs = passing(network, device)
    for value in (1, 2, 3):
        answer(graphs, device, np.full((2, 1), value, np.float32))
    assert graphs.status == "off: a replayed pass answers otherwise than the pass itself"


@check
def the_probe_measures_replays() -> None:
    """Captured under another arithmetic than the tier's, they leave graphs off."""
    device, spec = opened("fp16"), PrecisionSpec("fp16")
    effective = attest(spec, device).effective
    assert graphed(lambda x: [x], spec, device, effective).status == "on"
    assert "the probe measures" in graphed(lambda x: [x], spec, device, "fp32-ieee").status
    device, spec = opened("fp32"), PrecisionSpec("fp32")
    npu().matmul.cube_math_type = npu().CubeMathType.USE_FP16
    status = graphed(lambda x: [x], spec, device, "fp32-ieee").status
    npu().matmul.cube_math_type = npu().CubeMathType.KEEP_DTYPE
    assert status.startswith("off: the probe measures fp32-storage-fp16-cube of a replay"), status


@check
def a_graph_keeps_the_switches_of_its_capture() -> None:
    """So one that is captured under a tier's switches stays true when user code flips them."""
    device = opened("fp32")
    tier = convert(networks.vision(), PrecisionSpec("fp32"), device)
    x = vision_rows()
    graph = device.capture(lambda *inputs: [tier(*inputs)], device.to_device([x]))
    npu().conv.allow_hf32 = True
    replayed = device.to_host(graph.replay(device.to_device([x]))[0])
    lossy = device.to_host(tier(*device.to_device([x])))
    npu().conv.allow_hf32 = False
    wanted = on_cpu(networks.vision(), x)
    assert np.array_equal(replayed, wanted)
    assert distance(lossy, wanted) > 1e-6


@check
def a_graph_that_does_not_fit_leaves_the_tier_without() -> None:
    """Memory runs out in the capture, beside the pass that had fitted."""

    class Grows(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            megabytes = 1 if self.calls <= 4 else 4096  # The pass itself, and three before the capture.
            held = torch.empty(megabytes << 20, dtype=torch.uint8, device=x.device)
            return x * 2 + held[:1] * 0

    device = opened()
    graphs = passing(Grows(), device)
    assert (answer(graphs, device, np.ones((2, 1), np.float32)) == 2).all()
    assert "did not fit" in graphs.status, graphs.status
    assert device.healthy()


def vision_graphs() -> tuple[GraphedPass, Any]:
    """A checked graph of `networks.vision`."""
    device = opened()
    graphs = passing(networks.vision(), device)
    for scale in (1, 2):
        answer(graphs, device, (vision_rows() * scale).astype(np.float32))
    assert graphs.status == "on"
    return graphs, device


@alone
def an_operator_fails_in_the_middle_of_a_replay() -> None:
    """No answer leaves, the device is given up, and nothing is replayed or passed again."""
    graphs, device = vision_graphs()
    set_fault("aclnnConvolution", AI_CORE, after=1)
    raised(DeviceLost, lambda: answer(graphs, device, vision_rows()))
    set_fault("", 0)
    assert device.poisoned
    raised(DeviceLost, lambda: answer(graphs, device, vision_rows()))


@alone
def a_replay_is_dropped_in_silence() -> None:
    """The outputs would be those of the batch before: the graph's own counter finds it."""
    graphs, device = vision_graphs()
    set_fault("replay", AI_CORE)
    assert "did not replay" in raised(DeviceLost, lambda: answer(graphs, device, vision_rows()))
    assert device.poisoned


@alone
def the_device_fails_during_a_capture() -> None:
    """Which is not taken for a model that cannot be captured."""

    class Breaks(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 5:  # The pass itself, three before the capture, and the capture.
                set_fault("", AI_CORE)
                return x * x.sum().item()
            return x * 2

    device = opened()
    graphs = passing(Breaks(), device)
    raised(DeviceLost, lambda: answer(graphs, device, np.ones((2, 1), np.float32)))
    assert device.poisoned


@alone
def an_old_card_has_no_graphs() -> None:
    """The tier is refused with the reason; without graphs it serves."""
    device = opened()
    raised(CaptureFailed, lambda: device.capture(lambda x: [x], device.to_device([vision_rows()])))
    assert "graphs: Ascend910A has no graphs" in raised(ConfigError, lambda: vision_engine("fp16"))
    assert vision_engine("fp16", graphs=False).run({"x": vision_rows(3)}).outputs["logits"].shape == (3, 10)


@alone
def torch_npu_gives_old_cards_no_graph_memory() -> None:
    """Why: what a graph uses is given to others once the capture has ended. On torch_npu alone.

    If this fails, torch_npu has changed for the better.
    """
    import torch_npu  # noqa: PLC0415  Only this process has it.

    npu().set_compile_mode(jit_compile=False)
    npu().config.allow_internal_format = False
    stream = npu().Stream()
    with npu().stream(stream):
        x = torch.ones(4, 4, dtype=torch.float16, device="npu:0")
        reserved = npu().memory_reserved()
        graph = npu().NPUGraph()
        with npu().graph(graph, stream=stream):
            y = x * 2
            address = y.data_ptr()
            z = y + 1
            del y
        others = [torch.zeros_like(x) for _ in range(8)]
    assert z.shape == x.shape
    is_old = torch_npu.npu.get_soc_version() < 200  # 910A; a 310P has pools, though no captures.
    assert (npu().memory_reserved() == reserved) is is_old
    assert (address in [other.data_ptr() for other in others]) is is_old


def main(results: Path, checks: str) -> None:
    """Run and write down."""
    chosen = CHECKS if checks == "graphs" else {checks: ALONE[checks]}
    found: dict[str, str | None] = {}
    for name, function in chosen.items():
        try:
            function()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
        # After every check: a check may take the process with it.
        results.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    # torch_npu's own exit waits for a device that a check has broken.
    os._exit(0)
