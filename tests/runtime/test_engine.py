"""The engine: a converted model on the CPU, its outputs checked, its weights loaded or refused."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from streamed_device import FakeDevice
from torch import nn

from serving.config import ModelConfig
from serving.errors import (
    BadShape,
    ConfigError,
    DeviceLost,
    DeviceOutOfMemory,
    ModelError,
    PrecisionUnavailable,
)
from serving.models.resolve import CallableSource
from serving.runtime.engine import Engine, open_plan_source
from serving.runtime.tier_plan import TierPlan
from serving.tensors import Signature, TensorSpec

OUTPUT = TensorSpec("y", "FP32", (-1, 3))
X = {"x": np.arange(8, dtype=np.float32).reshape(4, 2)}


class Two(nn.Module):
    """Two numbers in, three out: x @ weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The linear layer."""
        y: torch.Tensor = self.linear(x)
        return y


class Returns(nn.Module):
    """Returns whatever a function makes of its input."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        """The function's."""
        return self.function(x)


def plan_of(tier: str = "fp32", *, options: dict[str, Any] | None = None, **fields: Any) -> TierPlan:
    """A plan for one tier of a model."""
    model = {"name": "m", "source": "a:b", "tiers": {tier: options or {}}, **fields}
    return TierPlan(ModelConfig.model_validate(model), tier, threads=1)


def load(module: nn.Module, *outputs: TensorSpec, plan: TierPlan | None = None) -> Engine:
    """A loaded engine around a module."""
    signature = Signature((TensorSpec("x", "FP32", (-1, 2)),), outputs or (OUTPUT,))
    return Engine.load(plan or plan_of(), CallableSource(lambda: module, signature, "a:b"))


def test_a_batch_is_computed() -> None:
    """Named outputs, FP32, the time it took."""
    module = Two()
    result = load(module).run(X)
    expected = module(torch.from_numpy(X["x"])).detach().numpy()
    np.testing.assert_allclose(result.outputs["y"], expected, rtol=1e-6)
    assert result.outputs["y"].dtype == np.float32
    assert result.compute_s > 0


def test_the_description_tells_what_was_measured() -> None:
    """The probe's word, not the configuration's."""
    description = load(Two()).description
    assert (description.device, description.effective, description.failure) == ("cpu", "fp32-ieee", None)
    assert description.switches


@pytest.mark.parametrize("tier", ["fp16", "mixed", "bf16"])
def test_a_16_bit_tier_computes_less_precisely_and_says_so(tier: str) -> None:
    """Close to FP32, not equal, and sent as FP32."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
    exact = load(module).run(X).outputs["y"]
    engine = load(module, plan=plan_of(tier))
    rough = engine.run(X).outputs["y"]
    assert engine.description.effective != "fp32-ieee"
    assert rough.dtype == np.float32
    assert 0 < np.abs(rough - exact).max() < 0.05


def test_a_module_is_served_in_eval_mode_without_gradients() -> None:
    """Whatever its author left it in."""
    outputs = load(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.9)).train())
    np.testing.assert_array_equal(outputs.run(X).outputs["y"], outputs.run(X).outputs["y"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: {"b": x + 1, "a": x, "extra": None},
        lambda x: (x, x + 1),
        lambda x: [x, x + 1],
    ],
    ids=["by-name", "tuple", "list"],
)
def test_outputs_come_by_name_or_in_order(function: Callable[[torch.Tensor], Any]) -> None:
    """In the signature's order; a mapping's other entries are not sent."""
    engine = load(Returns(function), TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "FP32", (-1, 2)))
    outputs = engine.run(X).outputs
    assert list(outputs) == ["a", "b"]
    np.testing.assert_array_equal(outputs["b"], X["x"] + 1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: None, "returned NoneType, not tensors"),
        (lambda x: 3.0, "returned float"),
        (lambda x: x.detach().numpy(), "returned ndarray"),
        (lambda x: (), "returned 0 outputs"),
        (lambda x: (x, x), "returned 2 outputs"),
        (lambda x: {"z": x}, "no tensor for output y"),
        (lambda x: [None], "no tensor for output y"),
        (lambda x: x, r"shape \[2, 2\] for 2 rows"),
        (lambda x: x[:1, :1].expand(1, 3), r"shape \[1, 3\] for 2 rows"),
        (lambda x: x.sum(), r"shape \[\]"),
        (lambda x: torch.zeros(len(x), 3, 1), "its signature says"),
        (lambda x: torch.zeros(len(x), 3, dtype=torch.int64), "is int64; its signature says FP32"),
        (lambda x: torch.zeros(len(x), 3, dtype=torch.bool), "is bool"),
        (lambda x: torch.zeros(len(x), 3, dtype=torch.complex64), "is complex64"),
    ],
)
def test_outputs_that_are_not_the_signatures_are_refused_at_start(
    function: Callable[[torch.Tensor], Any], words: str
) -> None:
    """On the model's own examples, before the tier is ready."""
    with pytest.raises(ModelError, match=words):
        load(Returns(function))


@pytest.mark.parametrize(
    ("made", "declared", "fits"),
    [
        (torch.float64, "FP32", True),  # Floats come back FP32 from every tier.
        (torch.float32, "FP64", True),
        (torch.float32, "FP16", False),
        (torch.int32, "INT64", True),
        (torch.int64, "INT32", False),
        (torch.int64, "INT64", True),
        (torch.uint8, "INT16", False),
        (torch.bool, "BOOL", True),
        (torch.float32, "INT32", False),
        (torch.float32, "BYTES", False),
    ],
)
def test_an_output_may_be_stored_wider_and_is_never_narrowed(
    made: torch.dtype, declared: str, fits: bool
) -> None:
    """No value is changed in silence."""
    module = Returns(lambda x: torch.ones(len(x), 3, dtype=made))
    spec = TensorSpec("y", declared, (-1, 3))
    if not fits:
        with pytest.raises(ModelError, match="its signature says"):
            load(module, spec)
        return
    assert load(module, spec).run(X).outputs["y"].dtype == spec.numpy_dtype


def test_a_model_that_raises_tells_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The log has it; the engine goes on."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 4:
            raise RuntimeError("secret path")
        return torch.zeros(len(x), 3)

    engine = load(Returns(function))
    with pytest.raises(ModelError) as caught:
        engine.run(X)
    assert "secret" not in str(caught.value)
    assert "secret path" in caplog.text
    assert engine.run({"x": X["x"][:1]}).outputs["y"].shape == (1, 3)


def test_a_model_may_refuse_a_batch_itself() -> None:
    """With the error that the client shall see."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 4:
            raise BadShape("too many words")
        return torch.zeros(len(x), 3)

    with pytest.raises(BadShape):
        load(Returns(function)).run(X)


def test_a_callable_that_returns_no_module_is_refused() -> None:
    """By its name."""
    with pytest.raises(ConfigError, match=r"a:b returned dict, not a torch\.nn\.Module"):
        load({})  # type: ignore[arg-type]


def test_a_source_is_opened_with_the_configured_signature() -> None:
    """As the plan says."""
    tensor = {"name": "x", "dtype": "FP32", "shape": [-1, 5]}
    plan = plan_of(source="serving.models.echo:Echo", inputs=[tensor], outputs=[tensor])
    assert open_plan_source(plan).signature.inputs[0].shape == (-1, 5)


def test_weights_are_loaded_before_the_conversion(tmp_path: Path) -> None:
    """By the plan, with their hash checked."""
    path = tmp_path / "weights.safetensors"
    save_file({"linear.weight": torch.ones(3, 2), "linear.bias": torch.ones(3)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    plan = plan_of(weights=str(path), sha256=digest)
    np.testing.assert_array_equal(load(Two(), plan=plan).run(X).outputs["y"][0], [2, 2, 2])
    with pytest.raises(ConfigError, match="SHA-256"):
        load(Two(), plan=plan_of(weights=str(path), sha256="0" * 64))


def test_a_tier_that_the_device_refuses_is_unavailable() -> None:
    """Not a fault of the configuration: the reason goes to whoever asks for the tier."""
    with pytest.raises(PrecisionUnavailable, match="A 910A or 310P has no BF16"):
        load(Two(), plan=plan_of("bf16", card="910a"))
    with pytest.raises(PrecisionUnavailable, match="fp32-storage-fp16-cube"):
        load(Two(), plan=plan_of("fp32", card="310p"))


def test_a_degraded_tier_is_served_under_its_measured_name() -> None:
    """Where the configuration accepts it."""
    engine = load(Two(), plan=plan_of("fp32", card="910a", options={"accept_degraded": True}))
    assert engine.description.effective == "fp32-storage-fp16-cube-emulated"


def test_a_tier_with_the_cpu_as_its_own_device_leaves_the_card_out() -> None:
    """The reference beside a rehearsed card."""
    engine = load(Two(), plan=plan_of("fp32", card="910a", options={"device": "cpu"}))
    assert engine.description.effective == "fp32-ieee"


@pytest.mark.parametrize("tier", ["fp32", "fp16", "mixed", "bf16", "autocast", "layercast"])
def test_an_untouched_engine_is_neither_altered_nor_broken(tier: str) -> None:
    """The periodic check of a healthy replica finds nothing, however often."""
    engine = load(Two(), plan=plan_of(tier))
    for _ in range(3):
        assert engine.altered() is None
        assert engine.broken() is None


def test_a_flipped_switch_is_found() -> None:
    """By reading it again, whether or not this processor's arithmetic changes with it."""
    engine = load(Two())
    torch.set_float32_matmul_precision("medium")
    try:
        assert "float32_matmul_precision is medium, was highest" in (engine.altered() or "")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_lowered_arithmetic_is_found_though_no_switch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the probe: products of 16-bit operands behind an unchanged configuration."""
    engine = load(Two())
    exact = torch.nn.functional.linear

    def lowered(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return exact(x.bfloat16().float(), weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", lowered)
    assert "the probe measures fp32-storage-bf16-cube" in (engine.altered() or "")


def test_a_wrong_known_answer_is_found() -> None:
    """Weights that changed under a running replica, as a failing memory would."""
    module = Two()
    engine = load(module)
    with torch.no_grad():
        module.linear.weight += 1
    assert "the known answer y is off by" in (engine.broken() or "")


def test_a_model_that_draws_random_numbers_has_no_known_answer() -> None:
    """It would be replaced again and again."""
    engine = load(Returns(lambda x: torch.rand(x.shape[0], 3)))
    assert engine.known_answer == {}
    assert engine.broken() is None


def test_a_batch_that_does_not_fit_runs_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to one row, in order; one row that does not fit is the caller's to hear of."""
    engine = load(Two())
    expected = engine.run(X).outputs["y"]
    forward = Engine._forward
    sizes: list[int] = []

    def small(self: Engine, batch: Any, rows: int) -> Any:
        sizes.append(rows)
        if rows > 1:
            raise DeviceOutOfMemory("too large")
        return forward(self, batch, rows)

    monkeypatch.setattr(Engine, "_forward", small)
    np.testing.assert_allclose(engine.run(X).outputs["y"], expected, rtol=1e-6)
    assert sizes == [4, 2, 1, 1, 2, 1, 1]

    def nothing_fits(self: Engine, batch: Any, rows: int) -> Any:
        raise DeviceOutOfMemory("too large")

    monkeypatch.setattr(Engine, "_forward", nothing_fits)
    with pytest.raises(DeviceOutOfMemory):
        engine.run(X)


# Static shapes.


def static_plan(
    buckets: Any = "auto", max_rows: int = 4, *, graphs: bool = False, tier: str = "fp32"
) -> TierPlan:
    """A plan with buckets."""
    batching = {"max_rows": max_rows, "buckets": buckets}
    return plan_of(tier, options={"batching": batching, "graphs": graphs})


@pytest.fixture
def seen() -> list[int]:
    """Rows of every batch that a `watched` module was given."""
    return []


def watched(seen: list[int]) -> nn.Module:
    """Rows in, their sums out three times; the rows are noted."""

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x.sum(dim=1, keepdim=True).expand(-1, 3)

    return Returns(function)


def test_the_device_sees_buckets_and_the_client_its_rows(seen: list[int]) -> None:
    """Each batch in the smallest bucket that holds it; the known answer too."""
    engine = load(watched(seen), plan=static_plan([1, 3], max_rows=3))
    assert engine.description.switches["buckets"] == "1, 3"
    seen.clear()
    for rows in (1, 2, 3):
        x = X["x"][:rows]
        np.testing.assert_array_equal(engine.run({"x": x}).outputs["y"][:, 0], x.sum(axis=1))
    assert seen == [1, 3, 3]
    assert engine.broken() is None
    assert set(seen) == {1, 3}


def test_a_known_answer_fits_the_largest_bucket(seen: list[int]) -> None:
    """However many examples the model has: no request is larger."""
    engine = load(watched(seen), plan=static_plan([1], max_rows=1))
    assert engine.broken() is None
    assert set(seen) == {1}


def test_without_buckets_nothing_is_padded(seen: list[int]) -> None:
    """Nor told."""
    engine = load(watched(seen))
    seen.clear()
    engine.run({"x": X["x"][:3]})
    assert seen == [3]
    assert not {"buckets", "graphs"} & engine.description.switches.keys()


def test_a_padded_batch_that_does_not_fit_runs_in_padded_halves(
    seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows in a bucket of four, then one and two in theirs."""
    engine = load(watched(seen), plan=static_plan())
    forward = Engine._pass

    def small(self: Engine, *inputs: torch.Tensor) -> list[torch.Tensor]:
        if len(inputs[0]) > 2:
            raise DeviceOutOfMemory("too large")
        return forward(self, *inputs)

    monkeypatch.setattr(Engine, "_pass", small)
    seen.clear()
    outputs = engine.run({"x": X["x"][:3]}).outputs["y"]
    np.testing.assert_array_equal(outputs[:, 0], X["x"][:3].sum(axis=1))
    assert seen == [1, 2]


@pytest.mark.parametrize("tier", ["fp32", "fp16", "mixed", "autocast", "layercast", "bf16"])
@given(rows=st.integers(1, 6), buckets=st.sets(st.integers(1, 5)))
@settings(max_examples=20)
def test_padding_changes_no_row(tier: str, rows: int, buckets: set[int]) -> None:
    """More than a kernel for another number of rows does: last bits, and what rounding makes of them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
    x = np.random.default_rng(rows).standard_normal((rows, 2)).astype(np.float32)
    alone = load(module, plan=plan_of(tier)).run({"x": x}).outputs["y"]
    plan = static_plan([*sorted(buckets), 6], max_rows=6, tier=tier)
    padded = load(module, plan=plan).run({"x": x}).outputs["y"]
    assert padded.shape == alone.shape
    ulp = 2.0 ** {"fp32": -24, "layercast": -24, "bf16": -8}.get(tier, -11)
    np.testing.assert_allclose(padded, alone, atol=8 * ulp * np.abs(alone).max())


def test_graphs_are_refused_where_there_are_none() -> None:
    """Found by the replica where the configuration leaves the device open."""
    with pytest.raises(ConfigError, match=r"graphs: .* has no graphs"):
        load(Two(), plan=static_plan(graphs=True))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The device that every engine opens."""
    device = FakeDevice()
    monkeypatch.setattr("serving.runtime.engine.open_device", lambda *args, **kwargs: device)
    return device


@pytest.mark.parametrize("tier", ["fp32", "fp16", "mixed"])
def test_requests_and_the_known_answer_are_replays(fake: FakeDevice, tier: str) -> None:
    """A graph per bucket stands at the start; from then on the model's Python code rests."""
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
    eager = load(module, plan=static_plan(tier=tier))
    engine = load(module, plan=static_plan(graphs=True, tier=tier))
    assert engine.description.switches["graphs"] == "on"
    captured, before = len(fake.recordings), sum(recording.replays for recording in fake.recordings)
    for rows in (1, 2, 3, 4):
        found = engine.run({"x": X["x"][:rows]}).outputs["y"]
        np.testing.assert_array_equal(found, eager.run({"x": X["x"][:rows]}).outputs["y"])
    assert engine.broken() is None
    assert len(fake.recordings) == captured
    assert sum(recording.replays for recording in fake.recordings) == before + 5


def test_a_replayed_known_answer_that_is_wrong_is_found(fake: FakeDevice) -> None:
    """The graph's own memory, gone bad under a running replica."""
    engine = load(Two(), plan=static_plan([4], graphs=True))
    assert engine.broken() is None
    fake.recordings[-1].calls.insert(-1, fake.recordings[-1].calls[-1])
    with pytest.raises(DeviceLost):
        engine.broken()


def test_a_model_that_cannot_be_captured_is_served_without_graphs(fake: FakeDevice) -> None:
    """And its page says so."""
    engine = load(
        Returns(lambda x: x.sum(dim=1, keepdim=True).expand(-1, 3) * x.max().item()),
        plan=static_plan(graphs=True),
    )
    found = engine.run(X).outputs["y"]
    np.testing.assert_array_equal(found[:, 0], X["x"].sum(axis=1) * X["x"].max())
    assert engine.description.switches["graphs"].startswith("off: a pass of 1x2 cannot be captured: ")
