"""Checks that run in a process which sees a simulated card (stub CANN), one after another.

    python contract_child.py RESULTS.json CHECKS

CHECKS is `contract` or a name in `FAULTS`. Results are an error's text by check, None where it passed.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import networks
import numpy as np
import torch
from networks import set_fault

from serving.errors import DeviceLost, DeviceOutOfMemory, PrecisionUnavailable
from serving.models.efficientnet import EfficientNetLite0
from serving.models.minilm import MiniLM
from serving.numerics.capability import KINDS, capability
from serving.numerics.conversion import convert
from serving.numerics.devices import Cpu, open_device
from serving.numerics.operator_audit import departures
from serving.numerics.precision import Kind, PrecisionSpec
from serving.numerics.probe import admit, attest, expected

SOC = os.environ.get("FAKE_NPU_SOC", "")
IS_QUEUED = os.environ.get("TASK_QUEUE_ENABLE") != "0"
HAS_FP32 = SOC in ("Ascend910B1", "Ascend910_9391")
#: CANN's codes: AI core exception, and memory exhausted.
AI_CORE, NO_MEMORY = 507015, 207001

#: What the process has opened, for the checks that follow.
state = SimpleNamespace()

CHECKS: dict[str, Callable[[], None]] = {}
FAULTS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check to the contract, in the order of this file."""
    CHECKS[function.__name__] = function
    return function


def fault(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check that has a process of its own, since it leaves torch_npu unusable."""
    FAULTS[function.__name__] = function
    return function


def npu() -> Any:
    """`torch_npu.npu`."""
    import torch_npu  # noqa: PLC0415  Only this process has it.

    return torch_npu.npu


def stored(option: str) -> bytes:
    """An option as torch_npu keeps it."""
    import torch_npu  # noqa: PLC0415

    value: bytes = torch_npu._C._npu_getOption(option)
    return value


def raised(kind: type[BaseException], call: Callable[[], object]) -> str:
    """The text of the error that `call` must raise."""
    try:
        result = call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}, but {result!r}")


def parameters(function: Callable[..., object]) -> list[str]:
    """Names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def opened(kind: Kind = "fp16", *, accept_degraded: bool = False) -> Any:
    """The NPU, with its switches set for a tier."""
    return open_device("npu", 1, tier=kind, accept_degraded=accept_degraded)


def answers(module: Any, device: Any, *arrays: np.ndarray) -> np.ndarray:
    """As a tier computes a batch: in, through, out."""
    arguments = device.to_device(list(arrays))
    with device.running():
        returned = module(*arguments)
    answer: np.ndarray = device.to_host(returned)
    return answer


def vision_rows(rows: int = 5) -> np.ndarray:
    """A batch for `networks.vision`."""
    shape = (rows, networks.CHANNELS, networks.SIDE, networks.SIDE)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def on_cpu(module: torch.nn.Module, *arrays: np.ndarray) -> np.ndarray:
    """What the FP32 module answers on the CPU, with all switches strict."""
    device = Cpu(1)
    return answers(convert(module, PrecisionSpec("fp32"), device), device, *arrays)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative, of the whole batch."""
    return float(np.linalg.norm(found.astype(float) - wanted) / np.linalg.norm(wanted.astype(float)))


# Before the device is initialised.


@check
def defaults_are_the_lossy_ones() -> None:
    """What torch_npu does untold: HF32 convolutions, and nothing stored."""
    assert npu().conv.allow_hf32 is True
    assert npu().matmul.allow_hf32 is False
    assert stored("ACL_PRECISION_MODE") == b""
    assert stored("ALLOW_INTERNAL_FORMAT") == b""


@check
def set_option_takes_what_it_knows_and_refuses_the_rest() -> None:
    """Both precision modes are kept as bytes; unknown names and values raise."""
    for mode in ("allow_fp32_to_fp16", "must_keep_origin_dtype"):
        npu().set_option({"ACL_PRECISION_MODE": mode})
        assert stored("ACL_PRECISION_MODE") == mode.encode()
    assert "invalid npu option name" in raised(RuntimeError, lambda: npu().set_option({"NO_OPTION": "x"}))
    raised((RuntimeError, ValueError), lambda: npu().set_option({"ACL_PRECISION_MODE": "keep"}))


@check
def hf32_switches_read_back() -> None:
    """`conv.allow_hf32` and `matmul.allow_hf32`, both ways."""
    for owner in (npu().conv, npu().matmul):
        for value in (True, False):
            owner.allow_hf32 = value
            assert owner.allow_hf32 is value


@check
def cube_math_type_reads_back() -> None:
    """Every member that we use, by its name; nothing else is taken."""
    for name in ("KEEP_DTYPE", "ALLOW_FP32_DOWN_PRECISION", "USE_FP16", "USE_HF32"):
        npu().matmul.cube_math_type = npu().CubeMathType[name]
        assert npu().matmul.cube_math_type.name == name
    raised(Exception, lambda: setattr(npu().matmul, "cube_math_type", 7))


@check
def internal_format_is_written_and_read_by_another_name() -> None:
    """`config.allow_internal_format` is kept as `ALLOW_INTERNAL_FORMAT`."""
    for value, kept in ((True, b"enable"), (False, b"disable")):
        npu().config.allow_internal_format = value
        assert stored("ALLOW_INTERNAL_FORMAT") == kept


@check
def setting_options_initialises_nothing() -> None:
    """So they come before the first allocation."""
    npu().set_compile_mode(jit_compile=False)
    assert not npu().is_initialized()


@check
def signatures() -> None:
    """Parameters by the names that we give."""
    assert parameters(npu().set_compile_mode) == ["jit_compile"]
    assert parameters(npu().set_option)[:1] == ["option"]
    assert parameters(npu().set_device) == ["device"]
    assert parameters(npu().get_device_name)[0].startswith("device")
    assert parameters(npu().stream) == ["stream"]
    for function in (npu().mem_get_info, npu().memory_allocated, npu().memory_reserved):
        assert inspect.signature(function).parameters["device"].default is None
    for function in (
        npu().empty_cache, npu().is_available, npu().get_soc_version, npu().is_jit_compile_false,
    ):  # fmt: skip
        assert parameters(function) == []
    assert npu().is_available() is True


# Opening.


@check
def opening_sets_the_recipe() -> None:
    """All options, read back from the real torch_npu, whatever they were before."""
    npu().conv.allow_hf32 = npu().matmul.allow_hf32 = True
    npu().matmul.cube_math_type = npu().CubeMathType.USE_FP16
    npu().set_option({"ACL_PRECISION_MODE": "allow_fp32_to_fp16"})
    npu().config.allow_internal_format = True
    state.device = opened("fp32")
    assert dict(state.device.switches) == {
        "ACL_PRECISION_MODE": "must_keep_origin_dtype",
        "conv.allow_hf32": "False",
        "matmul.allow_hf32": "False",
        "matmul.cube_math_type": "KEEP_DTYPE",
        "ALLOW_INTERNAL_FORMAT": "disable",
        "jit_compile": "False",
        "num_threads": "1",
        "num_interop_threads": "1",
    }
    assert npu().is_jit_compile_false() is True


@check
def soc_and_family() -> None:
    """The SoC's number and name, the family, and whether it saturates."""
    version, family, saturates = {
        "Ascend910A": (102, "npu-910a", True),
        "Ascend910B1": (220, "npu-910b", False),
        "Ascend310P3": (202, "npu-310p", True),
        "Ascend910_9391": (250, "npu-a3", False),
    }[SOC]
    assert npu().get_soc_version() == version
    assert npu().utils.is_support_inf_nan() is not saturates
    device = state.device
    assert (device.kind, device.name, device.family, device.saturates) == ("npu", SOC, family, saturates)
    assert str(device.torch_device) == "npu:0"


@check
def memory_figures() -> None:
    """In bytes; what a tensor takes is seen, and given back."""
    device = opened()
    before = device.memory_bytes()
    assert before["total"] == int(os.environ["FAKE_NPU_HBM_MB"]) << 20
    tensor = torch.empty(8 << 20, dtype=torch.uint8, device="npu:0")
    during = device.memory_bytes()
    assert during["allocated"] - before["allocated"] >= tensor.nbytes
    assert during["reserved"] >= during["allocated"]
    assert during["free"] <= during["total"] - during["reserved"]
    del tensor
    npu().empty_cache()
    assert device.memory_bytes()["allocated"] == before["allocated"]


@check
def copies_are_pinned_and_exact() -> None:
    """Every dtype that requests have, in and out, through pinned memory."""
    device = opened()
    assert device._pinned(torch.ones(3)).is_pinned()
    for dtype in ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"):
        array = (np.arange(60).reshape(3, 4, 5) % 7).astype(dtype)
        for view in (array, array[:, ::2], array[::-1]):
            (tensor,) = device.to_device([view])
            assert tensor.device.type == "npu"
            back = device.to_host(tensor)
            assert back.dtype == view.dtype
            assert np.array_equal(back, view)
    assert device.to_host(torch.ones(3, dtype=torch.bfloat16).to("npu:0")).dtype == np.float32


@check
def work_runs_on_the_device_s_own_stream() -> None:
    """Within `running()`, on whatever thread, and not outside."""
    device = opened()

    def inside() -> bool:
        with device.running():
            own: bool = npu().current_stream() == device._own_stream
            return own

    assert inside()
    assert npu().current_stream() != device._own_stream
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda _: inside(), range(4)))
    device.synchronize()
    assert device.healthy()


@check
def batches_on_another_thread_than_the_opener_s() -> None:
    """The current device and stream are a thread's own."""
    device = opened()
    tier = convert(networks.Scale(), PrecisionSpec("fp16"), device)
    for n in range(4):
        with ThreadPoolExecutor(1) as thread:
            x = np.full((3, 1), n, np.float32)
            assert (thread.submit(answers, tier, device, x).result() == 4 * n).all()


# Arithmetic.


def attestation_of(kind: Kind) -> Callable[[], None]:
    """The probe's verdict on a kind is what the capability table lets expect."""

    def attested() -> None:
        spec = PrecisionSpec(kind)
        device = opened(kind)
        promised = capability(kind, device.family)
        if promised.status == "honoured":
            found = attest(spec, device)
            assert found.effective in expected(spec, device), found
            assert admit(spec, device, found) == found.effective
            if kind in ("fp16", "mixed", "autocast"):
                assert found.effective == ("fp16" if HAS_FP32 else "fp16-saturating"), found
            return
        refusal = raised(PrecisionUnavailable, lambda: admit(spec, device, attest(spec, device)))
        assert promised.reason in refusal, refusal
        if promised.status == "degraded":
            accepting = opened(kind, accept_degraded=True)
            found = attest(spec, accepting)
            assert found.effective == "fp32-storage-fp16-cube", found
            assert admit(spec, accepting, found, accept_degraded=True) == found.effective
            raised(PrecisionUnavailable, lambda: admit(spec, accepting, found))

    attested.__name__ = f"attestation_of_{kind}"
    return attested


for _kind in KINDS:
    check(attestation_of(_kind))


@check
def a_switch_flipped_by_user_code_is_measured() -> None:
    """What a model does to torch_npu's options after start does not pass the probe."""
    spec = PrecisionSpec("fp32")
    device = opened("fp32", accept_degraded=True)
    degraded = "hf32" if HAS_FP32 else "fp32-storage-fp16-cube"
    npu().conv.allow_hf32 = True
    assert attest(spec, device).conv == degraded
    npu().conv.allow_hf32 = False
    npu().matmul.cube_math_type = npu().CubeMathType.USE_FP16
    found = attest(spec, device)
    assert found.matmul == "fp32-storage-fp16-cube", found
    raised(PrecisionUnavailable, lambda: admit(spec, device, found))
    if HAS_FP32:
        assert attest(spec, opened("fp32")).effective == "fp32-ieee"


@check
def fp16_overflows_as_the_card_does() -> None:
    """4 x 16384 is 65504 on a 910A and infinite on a 910B; so is a NaN 0 or itself."""
    device = opened()
    tier = convert(networks.Scale(), PrecisionSpec("fp16"), device)
    x = np.array([[1], [16384], [-16384], [np.nan]], np.float32)
    limit, nan = (np.inf, np.nan) if HAS_FP32 else (65504, 0)
    found = answers(tier, device, x)
    assert np.array_equal(found, np.array([[4], [limit], [-limit], [nan]], np.float32), equal_nan=True), found


@check
def fp32_is_the_cpu_s_or_refused() -> None:
    """A 910B1 answers as the CPU does, to the bit; a 910A refuses products of FP32."""
    device, x = opened("fp32"), vision_rows()
    tier = convert(networks.vision(), PrecisionSpec("fp32"), device)
    if HAS_FP32:
        assert np.array_equal(answers(tier, device, x), on_cpu(networks.vision(), x))
    else:
        raised(DeviceLost, lambda: answers(tier, device, x))


@check
def sixteen_bit_tiers_are_near_the_cpu() -> None:
    """FP16, mixed and autocast: not FP32's answers, but near them."""
    x = vision_rows()
    wanted = on_cpu(networks.vision(), x)
    for kind in ("fp16", "mixed", "autocast"):
        device = opened(kind)
        example = device.to_device([x])
        tier = convert(networks.vision(), PrecisionSpec(kind), device, example)
        assert 1e-6 < distance(answers(tier, device, x), wanted) < 5e-3, kind


@check
def attention_is_measured_by_itself() -> None:
    """Fused on a 910B1, two products on a 910A; what overflows does so as in products."""
    spec = PrecisionSpec("fp16")
    found = attest(spec, opened())
    assert (found.attention, found.attention_mantissa_bits) == (
        "fp16" if HAS_FP32 else "fp16-saturating",
        11,
    ), found
    found = attest(PrecisionSpec("fp32"), opened("fp32", accept_degraded=True))
    assert found.attention == ("fp32-ieee" if HAS_FP32 else "fp32-storage-fp16-cube"), found


@check
def a_model_s_own_departures_are_found() -> None:
    """The audit sees torch_npu's operators: honest models depart in nothing, a hidden cast is named."""
    kinds: tuple[Kind, ...] = ("fp16", "mixed", "autocast", *(("fp32", "layercast") if HAS_FP32 else ()))
    for kind in kinds:
        device = opened(kind)
        example = device.to_device([vision_rows(1)])
        tier = convert(networks.vision(), PrecisionSpec(kind), device, example)
        with device.running():
            assert departures(tier, example) == (), kind
    if HAS_FP32:
        device = opened("fp32")
        example = device.to_device([vision_rows(1)])
        lowered = torch.nn.Sequential(networks.Narrowed(), networks.vision())
        tier = convert(lowered, PrecisionSpec("fp32"), device, example)
        with device.running():
            assert {(d.module, d.computes_in) for d in departures(tier, example)} == {("0", "fp16")}


@check
def weights_beyond_fp16_are_found() -> None:
    """Also on a card whose cast clamps them instead of making them infinite."""
    device = opened()
    network = networks.vision()
    network.features[1].running_var[3] = 1e6
    tier = convert(network, PrecisionSpec("fp16"), device)
    assert tier.kept_fp32 == ("features.1",), (tier.kept_fp32, tier.weight_losses)
    assert [(loss.name, loss.to_inf) for loss in tier.weight_losses] == [("features.1.running_var", 1)]


@check
def the_embedded_models_run() -> None:
    """all-MiniLM-L6-v2 and EfficientNet-Lite0, at the tiers that the documentation shows."""
    for source in (MiniLM(), EfficientNetLite0()):
        batch = list(source.preprocess(source.examples()).values())
        wanted = on_cpu(source.build(), *batch)
        kinds: tuple[Kind, ...] = ("fp32", "fp16", "mixed") if HAS_FP32 else ("fp16", "mixed")
        for kind in kinds:
            device = opened(kind)
            tier = convert(source.build(), PrecisionSpec(kind), device, device.to_device(batch))
            found = distance(answers(tier, device, *batch), wanted)
            assert found < 1e-6 if kind == "fp32" else 1e-5 < found < 1e-2, (source, kind, found)


# Memory, last of all but the fault: it leaves the allocator in another state.


@check
def a_batch_too_large_is_refused_and_the_next_one_answered() -> None:
    """Memory runs out, is given back, and the device goes on."""
    device = opened()
    tier = convert(networks.Outer(), PrecisionSpec("fp16"), device)
    small, large = np.ones((4, 1), np.float32), np.ones((14_000, 1), np.float32)
    before = device.memory_bytes()["allocated"]
    for _ in range(3):
        try:
            answers(tier, device, large)
        except DeviceOutOfMemory:
            # Even while the error is being handled: what the batch had taken is free again.
            assert device.memory_bytes()["allocated"] <= before + (1 << 20), device.memory_bytes()
            assert (answers(tier, device, small) == 2).all()
        else:
            raise AssertionError("it fitted")
    assert not device.poisoned
    assert device.healthy()


@check
def no_answer_leaves_after_a_fault() -> None:
    """An operator fails in the middle of a batch: nothing later is believed, even once it works again."""
    device = opened()
    tier = convert(networks.vision(), PrecisionSpec("fp16"), device)
    x = vision_rows()
    kept = device.to_device([x])
    answers(tier, device, x)
    set_fault("aclnnConvolution", AI_CORE, after=1)
    raised(DeviceLost, lambda: answers(tier, device, x))
    set_fault("", 0)
    assert device.poisoned
    assert not device.healthy()
    raised(DeviceLost, lambda: answers(tier, device, x))
    raised(DeviceLost, lambda: device.to_host(kept[0]))
    raised(DeviceLost, device.synchronize)


# Faults with a process of their own.


def answer_under(operator: str, code: int, *, after: int = 0) -> None:
    """Check that no answer leaves once `operator` fails, and that the device is given up."""
    device = opened()
    tier = convert(networks.vision(), PrecisionSpec("fp16"), device)
    x = vision_rows()
    answers(tier, device, x)
    set_fault(operator, code, after)
    raised(DeviceLost, lambda: answers(tier, device, x))
    assert device.poisoned


@fault
def synchronisation_fails() -> None:
    """The error comes out of waiting, with no operator named."""
    answer_under("sync", AI_CORE)


@fault
def a_copy_fails() -> None:
    """In or out of the device. In the default mode torch_npu may end the process, which is as good."""
    answer_under("memcpy", AI_CORE)


@fault
def the_known_answer_finds_a_silent_fault() -> None:
    """Between batches: the health check computes, and gives the device up."""
    device = opened()
    assert device.healthy()
    set_fault("", AI_CORE)
    assert not device.healthy()
    set_fault("", 0)
    assert not device.healthy()
    raised(DeviceLost, lambda: device.to_device([np.ones((1, 1), np.float32)]))


@fault
def an_operator_has_no_memory() -> None:
    """Reported from within an operator: whatever torch_npu makes of it, no answer leaves."""
    device = opened()
    tier = convert(networks.vision(), PrecisionSpec("fp16"), device)
    x = vision_rows()
    answers(tier, device, x)
    set_fault("aclnnConvolution", NO_MEMORY)
    raised((DeviceLost, DeviceOutOfMemory), lambda: answers(tier, device, x))
    set_fault("", 0)
    if device.poisoned:
        raised(DeviceLost, lambda: answers(tier, device, x))
    else:
        assert np.array_equal(answers(tier, device, x), answers(tier, device, x))


@fault
def a_model_that_swallows_the_error_gives_no_answer() -> None:
    """torch_npu raises once, to whoever asks next; here that is the model, which goes on regardless.

    In the default mode later operators are then dropped and results are uninitialised memory, so
    the counter finds it; otherwise the error was the model's to handle and the answer is right.
    """

    class Careless(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # x: [rows, 1]
            if len(x) == 3:
                set_fault("", AI_CORE)
                raised(RuntimeError, lambda: x.exp().sum().item())
                set_fault("", 0)
            return x * 2

    device = opened()
    tier = convert(Careless(), PrecisionSpec("fp16"), device)
    assert (answers(tier, device, np.ones((2, 1), np.float32)) == 2).all()
    three = np.ones((3, 1), np.float32)
    if IS_QUEUED:
        raised(DeviceLost, lambda: answers(tier, device, three))
        assert device.poisoned
    else:
        assert (answers(tier, device, three) == 2).all()


@fault
def torch_npu_drops_operators_after_a_fault() -> None:
    """Why all this: the finding itself, on torch_npu alone, without our device.

    If this fails, torch_npu has changed for the better.
    """
    import torch_npu  # noqa: F401, PLC0415

    npu().set_compile_mode(jit_compile=False)
    npu().config.allow_internal_format = False
    ones = torch.ones(4, 4, dtype=torch.float16, device="npu:0")
    npu().synchronize()
    set_fault("", AI_CORE)

    def product() -> float:
        value = (ones @ ones).sum()
        npu().synchronize()
        return float(value)

    raised(RuntimeError, product)
    set_fault("", 0)
    wrong = product() != 64
    assert wrong is IS_QUEUED


def main(results: Path, checks: str) -> None:
    """Run and write down."""
    chosen = CHECKS if checks == "contract" else {checks: FAULTS[checks]}
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
