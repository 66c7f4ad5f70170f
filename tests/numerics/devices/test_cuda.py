"""CUDA as far as a CPU build has it: the flags, their order, and refusals."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from serving.errors import ConfigError
from serving.numerics.devices import cuda, open_device

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Flags as torch has them by default, afterwards too."""
    yield
    CUDNN.allow_tf32, MATMUL.allow_tf32 = True, False
    CUDNN.conv.fp32_precision = CUDNN.rnn.fp32_precision = "tf32"
    MATMUL.fp32_precision = "none"
    MATMUL.allow_fp16_reduced_precision_reduction = MATMUL.allow_bf16_reduced_precision_reduction = True
    # "none" is not "ieee" to the CPU's setters.
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("tf32", "precision"), [(False, "ieee"), (True, "tf32")])
def test_flags_are_set_and_read_back(tf32: bool, precision: str) -> None:
    """Old flags and new agree, and reduced-precision sums are off in both."""
    read = cuda.set_precision(tf32=tf32)
    assert read == {
        "cudnn.allow_tf32": str(tf32),
        "matmul.allow_tf32": str(tf32),
        "cudnn.conv.fp32_precision": precision,
        "cudnn.rnn.fp32_precision": precision,
        "matmul.fp32_precision": precision,
        "matmul.allow_fp16_reduced_precision_reduction": "False",
        "matmul.allow_bf16_reduced_precision_reduction": "False",
        "matmul.allow_fp16_accumulation": "False",
    }
    # The order matters: with the new flags set alone, reading the old ones raises.
    assert (CUDNN.allow_tf32, MATMUL.allow_tf32) == (tf32, tf32)
    assert CUDNN.conv.fp32_precision == MATMUL.fp32_precision == precision


def test_old_flags_are_set_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag is written once, the old ones before the new ones."""
    written: list[str] = []

    class Flags:
        def __setattr__(self, flag: str, value: object) -> None:
            written.append(flag)
            super().__setattr__(flag, value)

    fake_cudnn = Flags()
    fake_cudnn.__dict__.update(conv=Flags(), rnn=Flags())
    monkeypatch.setattr(torch.backends, "cudnn", fake_cudnn)
    monkeypatch.setattr(torch.backends.cuda, "matmul", Flags())
    cuda.set_precision(tf32=False)
    assert written[:2] == ["allow_tf32"] * 2
    assert written[2:5] == ["fp32_precision"] * 3
    assert len(written) == 8


def test_a_flag_that_does_not_stick_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads back otherwise is named."""

    class Deaf:
        allow_tf32 = True

        def __setattr__(self, flag: str, value: object) -> None:
            if flag != "allow_tf32":
                super().__setattr__(flag, value)

    monkeypatch.setattr(torch.backends.cuda, "matmul", Deaf())
    with pytest.raises(ConfigError, match=r"matmul\.allow_tf32=True"):
        cuda.set_precision(tf32=False)


@pytest.mark.parametrize(
    ("turn_on", "name"),
    [
        (lambda: setattr(CUDNN, "allow_tf32", True), "cudnn.allow_tf32"),
        (lambda: setattr(MATMUL, "allow_tf32", True), "matmul.allow_tf32"),
        (lambda: torch.set_float32_matmul_precision("medium"), "matmul.fp32_precision"),
        (lambda: setattr(MATMUL, "allow_fp16_accumulation", True), "matmul.allow_fp16_accumulation"),
    ],
)
def test_a_flag_turned_on_later_is_read(turn_on: Callable[[], None], name: str) -> None:
    """Negative control: whatever user code turns on by whichever name, the read-back changes."""
    before = cuda.set_precision(tf32=False)
    turn_on()
    try:
        assert cuda.read_precision()[name] != before[name]
    finally:
        MATMUL.allow_fp16_accumulation = False


def test_a_contradiction_of_old_and_new_flags_is_told() -> None:
    """TF32 turned on for convolutions alone: torch refuses to say what the old flag is."""
    before = cuda.set_precision(tf32=False)
    CUDNN.conv.fp32_precision = "tf32"
    read = cuda.read_precision()
    assert read["cudnn.allow_tf32"] == "contradictory" != before["cudnn.allow_tf32"]
    assert read["cudnn.conv.fp32_precision"] == "tf32"


def test_environment_may_not_override(monkeypatch: pytest.MonkeyPatch) -> None:
    """An override from outside would make every flag a lie, whatever its value."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0")
    with pytest.raises(ConfigError, match="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        cuda.set_precision(tf32=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_no_gpu() -> None:
    """Opening without one says so and what to do."""
    with pytest.raises(ConfigError, match=r"device: torch sees no CUDA device; set device: cpu"):
        open_device("cuda", threads=1)


def test_a_graph_records_the_devices_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and options of `torch.cuda` that a CPU build has; no CUDA graph is captured anywhere here."""
    assert {"cuda_graph", "stream", "capture_error_mode"} <= inspect.signature(
        torch.cuda.graph
    ).parameters.keys()
    assert {"replay", "capture_begin", "capture_end"} <= set(dir(torch.cuda.CUDAGraph))
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "a graph")
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, **options: asked.append((graph, options)) or "a context"
    )
    device = cuda.Cuda.__new__(cuda.Cuda)
    device._own_stream = "a stream"
    recorder = device._recorder()
    assert (recorder.recording, recorder.context) == ("a graph", "a context")
    assert asked == [("a graph", {"stream": "a stream", "capture_error_mode": "thread_local"})]
