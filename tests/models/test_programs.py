"""Models delivered as TorchScript and exported programs: converted, watched, and never unpickled."""

import contextlib
import hashlib
import io
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from serving.config import ModelConfig
from serving.errors import ConfigError, PrecisionUnavailable
from serving.models.programs import ExportedProgram, ProgramFile, TorchScript
from serving.numerics.conversion import convert
from serving.numerics.devices import Device
from serving.numerics.operator_audit import admit_model, departures
from serving.numerics.precision import PrecisionSpec
from serving.runtime.engine import Engine, open_plan_source
from serving.runtime.tier_plan import TierPlan
from serving.runtime.weights import build_module
from serving.tensors import Signature, TensorSpec

SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 3, 8)),), (TensorSpec("y", "FP32", (-1, 2)),))
X = torch.rand(4, 3, 8, generator=torch.Generator().manual_seed(0))

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # torch's own, when it copies or saves a tree specification.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Network(nn.Module):
    """A bit of everything: layers, buffers, a constant that is no buffer, created tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([1.1]))
        self.constant = torch.linspace(0.1, 1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: [rows, 3, 8] -> [rows, 2]
        pooled = self.features(x).mean(-1) * self.constant + torch.arange(4, device=x.device)
        return torch.softmax(self.head(pooled) * self.scale, -1)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """Eager, with fixed weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().eval().requires_grad_(False)


def save_traced(network: nn.Module, path: Path) -> ProgramFile:
    """`torch.jit.trace`."""
    torch.jit.save(torch.jit.trace(network, X), path)
    return TorchScript()


def save_scripted(network: nn.Module, path: Path) -> ProgramFile:
    """`torch.jit.script`."""
    torch.jit.save(torch.jit.script(network), path)
    return TorchScript()


def save_exported(network: nn.Module, path: Path) -> ProgramFile:
    """`torch.export`."""
    rows = {"x": {0: torch.export.Dim("rows")}}
    torch.export.save(torch.export.export(network, (X,), dynamic_shapes=rows), path)
    return ExportedProgram()


SAVERS = [save_traced, save_scripted, save_exported]
Saver = Callable[[nn.Module, Path], ProgramFile]


def saved(saver: Saver, network: nn.Module, folder: Path) -> ProgramFile:
    """The source of a saved network, with file and hash as from a configuration."""
    path = folder / "model.pt2"
    source = saver(network, path)
    source.signature, source.path = SIGNATURE, path
    source.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return source


@pytest.mark.parametrize("saver", SAVERS)
def test_fp32_is_the_eager_model_s_answer(
    saver: Saver, network: nn.Module, device: Device, tmp_path: Path
) -> None:
    """To the bit, in other batches than that of the trace too."""
    module = build_module(saved(saver, network, tmp_path))
    tier = convert(module, PrecisionSpec("fp32"), device, [X])
    for rows in (1, 3, 4):
        assert torch.equal(tier(X[:rows]), network(X[:rows]))
    assert departures(tier, [X]) == ()


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_sixteen_bit_tiers_are_emulated_as_the_eager_model_s(
    saver: Saver, network: nn.Module, device: Device, tmp_path: Path, kind: str
) -> None:
    """The emulation sees a program's operators: the same rounding, but for constants of a trace."""
    module = build_module(saved(saver, network, tmp_path))
    eager, tier = (convert(each, PrecisionSpec(kind), device, [X]) for each in (network, module))
    assert not torch.equal(tier(X), network(X))
    assert torch.allclose(tier(X), eager(X), atol=1e-3 if kind == "fp16" else 1e-2)
    assert not any(departure.material for departure in departures(tier, [X]))


@pytest.mark.parametrize("saver", SAVERS)
def test_weights_that_would_be_lost_are_found(
    saver: Saver, network: nn.Module, device: Device, tmp_path: Path
) -> None:
    """Refused by name, or kept: an exported program's module as the eager one's, TorchScript's not alone."""
    overflowing = Network().eval().requires_grad_(False)
    overflowing.features[1].running_var[0] = 1e6
    module = build_module(saved(saver, overflowing, tmp_path))
    with pytest.raises(
        PrecisionUnavailable, match=r"features\.1\.running_var: of 4 values 1 become infinite"
    ):
        convert(module, PrecisionSpec("fp16", on_weight_loss="refuse"), device, [X])
    if saver is save_exported:
        tier = convert(module, PrecisionSpec("fp16"), device, [X])
        assert tier.kept_fp32 == ("features.1",)
        assert torch.allclose(tier(X), overflowing(X), atol=1e-3)
    else:
        with pytest.raises(ConfigError, match="cannot stay FP32 alone; serve the eager model"):
            convert(module, PrecisionSpec("fp16"), device, [X])


def test_an_exported_program_has_a_mixed_tier(network: nn.Module, device: Device, tmp_path: Path) -> None:
    """Its modules keep their names, so those of the eager model are kept."""
    module = build_module(saved(save_exported, network, tmp_path))
    tier = convert(module, PrecisionSpec("mixed", keep_fp32=("head",)), device, [X])
    assert torch.allclose(tier(X), network(X), atol=1e-3)
    assert departures(tier, [X]) == ()
    with pytest.raises(ConfigError, match="the nearest name is 'head'"):
        convert(module, PrecisionSpec("mixed", keep_fp32=("heat",)), device, [X])


def test_an_exported_program_runs_in_torch_s_own_half(
    network: nn.Module, device: Device, tmp_path: Path
) -> None:
    """Weights and constants alike are converted."""
    module = build_module(saved(save_exported, network, tmp_path))
    tier = convert(module, PrecisionSpec("fp16", native=True), device, [X])
    assert torch.allclose(tier(X), network(X), atol=2e-3)


def test_a_frozen_graph_is_refused(network: nn.Module, tmp_path: Path) -> None:
    """Its weights are constants, which no conversion could reach."""

    def save_frozen(network: nn.Module, path: Path) -> ProgramFile:
        torch.jit.save(torch.jit.freeze(torch.jit.trace(network, X)), path)
        return TorchScript()

    with pytest.raises(ConfigError, match="has no weights, or is frozen"):
        saved(save_frozen, network, tmp_path).build()


def test_products_with_a_traced_constant_are_found(device: Device, tmp_path: Path) -> None:
    """Negative control: a matrix that is no parameter stays FP32 in a trace, and the tier is refused."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.matrix = torch.rand(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).mean(1) @ self.matrix

    model = Constant().eval().requires_grad_(False)
    tier = convert(build_module(saved(save_traced, model, tmp_path)), PrecisionSpec("fp16"), device, [X])
    with pytest.raises(PrecisionUnavailable, match="the model itself runs aten::matmul in fp32"):
        admit_model("fp16-emulated", departures(tier, [X]))
    # The same as an exported program is converted whole.
    tier = convert(build_module(saved(save_exported, model, tmp_path)), PrecisionSpec("fp16"), device, [X])
    assert departures(tier, [X]) == ()


@pytest.mark.parametrize("kind", [TorchScript, ExportedProgram])
def test_bad_files_are_refused(kind: type[ProgramFile], tmp_path: Path) -> None:
    """None, missing, of another hash, no archive."""
    source = kind()
    with pytest.raises(ConfigError, match="a program is its file"):
        source.build()
    source.path, source.sha256 = tmp_path / "model", "0" * 64
    with pytest.raises(ConfigError, match="cannot read model"):
        source.build()
    source.path.write_bytes(b"no archive at all")
    with pytest.raises(ConfigError, match="not the expected file"):
        source.build()
    source.sha256 = hashlib.sha256(source.path.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match="is no "):
        source.build()


class Owned:
    """Pickled, it creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def rewritten(
    archive: bytes, change: Callable[[str, bytes], tuple[str, bytes]], *extra: tuple[str, bytes]
) -> bytes:
    """The archive with its entries changed, and some added."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for name in old.namelist():
            inner, data = change(name.partition("/")[2], old.read(name))
            new.writestr(f"{root}/{inner}", data)
        for name, data in extra:
            new.writestr(f"{root}/{name}", data)
    return out.getvalue()


@pytest.mark.parametrize("where", ["sample inputs", "pickled weight", "opaque constant", "legacy weights"])
def test_nothing_in_an_exported_program_is_unpickled(network: nn.Module, tmp_path: Path, where: str) -> None:
    """Wherever `torch.export.load` would unpickle, the archive is refused before it does."""
    source = saved(save_exported, network, tmp_path)
    owned = tmp_path / "owned"
    assert source.path is not None
    buffer = io.BytesIO()
    torch.save(Owned(owned), buffer)
    evil = buffer.getvalue()
    owned.unlink(missing_ok=True)

    def change(name: str, data: bytes) -> tuple[str, bytes]:
        if where == "sample inputs" and name.startswith("data/sample_inputs"):
            return name, evil
        if where == "pickled weight" and name == "data/weights/weight_0":
            return name, evil
        if where == "pickled weight" and name == "data/weights/model_weights_config.json":
            return name, data.replace(b'"use_pickle": false', b'"use_pickle": true', 1)
        return name, data

    extra = {
        "opaque constant": [("data/constants/opaque_obj_0", pickle.dumps(Owned(owned)))],
        "legacy weights": [("data/weights/model.pt", evil)],
    }.get(where, [])
    archive = rewritten(source.path.read_bytes(), change, *extra)
    source.path.write_bytes(archive)
    source.sha256 = hashlib.sha256(archive).hexdigest()
    with pytest.raises(ConfigError):
        source.build()
    assert not owned.exists()
    if where == "opaque constant":
        return  # Read only where the archive's own list names it.
    # Negative control: torch itself is taken in, and may fail only afterwards.
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        torch.export.load(io.BytesIO(archive))
    assert owned.exists()


def test_an_exported_program_needs_its_hash(network: nn.Module, tmp_path: Path) -> None:
    """Reading one runs code, so the file is vouched for by whoever configures it."""
    source = saved(save_exported, network, tmp_path)
    source.sha256 = None
    with pytest.raises(ConfigError, match="an exported program is code; give its sha256"):
        source.build()


@pytest.mark.parametrize("saver", [save_traced, save_exported])
@pytest.mark.parametrize("tier", ["fp32", "fp16"])
def test_a_tier_of_a_program_is_configured_like_any_other(
    saver: Saver, network: nn.Module, tmp_path: Path, tier: str
) -> None:
    """Source, weights and hash in the configuration; attested, served, checked again."""
    source = saved(saver, network, tmp_path)
    model = ModelConfig.model_validate(
        {
            "name": "m",
            "source": f"serving.models.programs:{type(source).__name__}",
            "weights": source.path,
            "sha256": source.sha256,
            "inputs": [{"name": "x", "dtype": "FP32", "shape": [-1, 3, 8]}],
            "outputs": [{"name": "y", "dtype": "FP32", "shape": [-1, 2]}],
            "tiers": {tier: {}},
        }
    )
    plan = TierPlan(model, tier, threads=1)
    engine = Engine.load(plan, open_plan_source(plan))
    answer = engine.run({"x": X.numpy()}).outputs["y"]
    assert np.allclose(answer, network(X).numpy(), atol=1e-6 if tier == "fp32" else 1e-3)
    assert engine.altered() is None
