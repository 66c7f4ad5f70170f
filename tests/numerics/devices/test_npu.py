"""The NPU against a stand-in for torch_npu's names: order of the recipe, read-back, SoCs.

What the real torch_npu makes of the same calls is not tested here.
"""

import sys
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from serving.errors import ConfigError
from serving.numerics.devices import CaptureFailed, npu, open_device


class CubeMathType(IntEnum):
    """As in torch_npu 2.13.0."""

    KEEP_DTYPE = 0
    ALLOW_FP32_DOWN_PRECISION = 1
    USE_FP16 = 2
    USE_HF32 = 3


class Recorder:
    """An options object that notes what is written to it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.__dict__.update(_name=name, _log=log, allow_hf32=True, cube_math_type=None)

    def __setattr__(self, option: str, value: Any) -> None:
        self._log.append(f"{self._name}.{option}={getattr(value, 'name', value)}")
        self.__dict__[option] = value


def fake_torch_npu(soc: int, log: list[str], *, available: bool = True, deaf: bool = False) -> ModuleType:
    """A module with the names that the device uses and no others."""
    stored: dict[str, bytes] = {}

    def set_option(options: dict[str, str]) -> None:
        log.extend(f"{name}={value}" for name, value in options.items())
        if not deaf:
            stored.update({name: value.encode() for name, value in options.items()})

    class Config:
        def __setattr__(self, option: str, value: bool) -> None:
            log.append(f"config.{option}={value}")
            stored["ALLOW_INTERNAL_FORMAT"] = b"enable" if value else b"disable"

    def set_compile_mode(*, jit_compile: bool) -> None:
        log.append(f"jit_compile={jit_compile}")

    module = ModuleType("torch_npu")
    module._C = SimpleNamespace(_npu_getOption=lambda name: stored.get(name, b""))
    module.npu = SimpleNamespace(
        CubeMathType=CubeMathType,
        conv=Recorder("conv", log),
        matmul=Recorder("matmul", log),
        config=Config(),
        set_option=set_option,
        set_compile_mode=set_compile_mode,
        is_jit_compile_false=lambda: "jit_compile=False" in log,
        is_available=lambda: available,
        set_device=lambda device: log.append("set_device"),
        get_soc_version=lambda: soc,
        get_device_name=lambda index: f"Ascend-{soc}",
        mem_get_info=lambda: (3, 4),
        memory_allocated=lambda: 1,
        memory_reserved=lambda: 2,
        Stream=lambda device: "a stream",
        empty_cache=lambda: log.append("empty_cache"),
    )
    return module


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called; torch is given a device type `npu`."""
    real = torch.device
    monkeypatch.setattr(torch, "device", lambda kind, index=None: "npu:0" if kind == "npu" else real(kind))
    return []


RECIPE = [
    "ACL_PRECISION_MODE=must_keep_origin_dtype",
    "conv.allow_hf32=False",
    "matmul.allow_hf32=False",
    "matmul.cube_math_type=KEEP_DTYPE",
    "jit_compile=False",
    "config.allow_internal_format=False",
    "set_device",
]


def opened(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **kwargs: Any) -> Any:
    """The device over a stand-in."""
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return open_device("npu", 1, **kwargs)


def test_recipe_in_its_order(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """Every option comes before the device is initialised, and is read back."""
    device = opened(monkeypatch, fake_torch_npu(220, log))
    assert log == RECIPE
    assert dict(device.switches) == {
        "ACL_PRECISION_MODE": "must_keep_origin_dtype",
        "conv.allow_hf32": "False",
        "matmul.allow_hf32": "False",
        "matmul.cube_math_type": "KEEP_DTYPE",
        "ALLOW_INTERNAL_FORMAT": "disable",
        "jit_compile": "False",
        "num_threads": "1",
        "num_interop_threads": "1",
    }
    assert (device.kind, device.name, device.family) == ("npu", "Ascend-220", "npu-910b")
    assert device.memory_bytes() == {"allocated": 1, "reserved": 2, "free": 3, "total": 4}


def test_hf32_is_switched_on_for_its_tier_alone(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """In convolutions, in products, and in the option that overrides both."""
    device = opened(monkeypatch, fake_torch_npu(220, log), tier="hf32")
    assert device.switches["conv.allow_hf32"] == device.switches["matmul.allow_hf32"] == "True"
    assert device.switches["matmul.cube_math_type"] == "USE_HF32"


@pytest.mark.parametrize(
    ("soc", "tier", "accept", "mode"),
    [
        (102, "fp32", False, "must_keep_origin_dtype"),
        (102, "layercast", False, "must_keep_origin_dtype"),
        (102, "fp32", True, "allow_fp32_to_fp16"),
        (102, "mixed", False, "allow_fp32_to_fp16"),
        (205, "fp16", False, "allow_fp32_to_fp16"),
        (220, "mixed", False, "must_keep_origin_dtype"),
        (220, "fp32", True, "must_keep_origin_dtype"),
    ],
)
def test_fp32_products_of_old_cards(
    monkeypatch: pytest.MonkeyPatch, log: list[str], *, soc: int, tier: Any, accept: bool, mode: str
) -> None:
    """They fail where FP32 was promised, and run in FP16 where it was not or that is accepted."""
    device = opened(monkeypatch, fake_torch_npu(soc, log), tier=tier, accept_degraded=accept)
    assert log[: len(RECIPE)] == RECIPE
    assert device.switches["ACL_PRECISION_MODE"] == mode
    in_fp16 = mode == "allow_fp32_to_fp16"
    assert device.switches["matmul.cube_math_type"] == ("USE_FP16" if in_fp16 else "KEEP_DTYPE")


@pytest.mark.parametrize(
    ("soc", "saturates"), [(102, True), (104, True), (203, True), (240, True), (220, False), (250, False)]
)
def test_saturation_by_soc(
    monkeypatch: pytest.MonkeyPatch, log: list[str], soc: int, saturates: bool
) -> None:
    """910A, 310P and 310B have no infinities."""
    assert opened(monkeypatch, fake_torch_npu(soc, log)).saturates is saturates


def test_refusals(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """No card, an unknown card, an option that does not stick, no torch_npu."""
    for module, message in (
        (fake_torch_npu(220, log, available=False), "sees no NPU"),
        (fake_torch_npu(300, log), "SoC version 300"),
        (fake_torch_npu(220, log, deaf=True), "ACL_PRECISION_MODE=unset"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(monkeypatch, module)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match="torch_npu cannot be imported"):
        open_device("npu", 1)


def test_presence_is_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu is looked for, never imported; without devices it does not count."""
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: object())
    for nodes, present in (([], False), (["/dev/davinci0"], True)):
        monkeypatch.setattr(npu.Path, "glob", lambda self, pattern, nodes=nodes: iter(nodes))
        assert npu.npu_present() is present
    assert "torch_npu" not in sys.modules
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: None)
    assert not npu.npu_present()


@pytest.mark.parametrize(
    ("soc", "graphs"), [(102, False), (205, False), (220, True), (240, False), (250, True), (260, True)]
)
def test_graphs_where_cann_documents_captures(
    monkeypatch: pytest.MonkeyPatch, log: list[str], *, soc: int, graphs: bool
) -> None:
    """Atlas A2, A3 and 950; elsewhere a capture is refused before torch_npu is asked."""
    device = opened(monkeypatch, fake_torch_npu(soc, log))
    assert device.has_graphs is graphs
    if not graphs:
        with pytest.raises(CaptureFailed, match=f"Ascend-{soc} has no graphs"):
            device.capture(lambda x: [x], [torch.ones(1)])


def test_a_graph_records_the_devices_own_stream(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """With the options that torch_npu 2.13.0 takes; what it makes of them the simulated card shows."""
    module = fake_torch_npu(220, log)
    asked: list[Any] = []
    module.npu.NPUGraph = lambda: "a graph"
    module.npu.graph = lambda graph, **options: asked.append((graph, options)) or "a context"
    recorder = opened(monkeypatch, module)._recorder()
    assert (recorder.recording, recorder.context) == ("a graph", "a context")
    assert asked == [("a graph", {"stream": "a stream", "capture_error_mode": "thread_local"})]
