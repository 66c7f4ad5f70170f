"""A tier's pass through graphs, on the CPU behind a stream: when a replay is believed, and when not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from streamed_device import FakeDevice
from torch import nn

from serving.errors import DeviceLost
from serving.numerics.conversion import convert
from serving.numerics.graphs import GraphedPass, graphed
from serving.numerics.precision import PrecisionSpec
from serving.numerics.probe import attest


@pytest.fixture
def fake() -> FakeDevice:
    """A healthy one, with graphs."""
    return FakeDevice()


def rows(*values: float) -> list[torch.Tensor]:
    """One tensor [rows, 1]."""
    return [torch.tensor([[float(value)] for value in values])]


def squares(x: torch.Tensor) -> list[torch.Tensor]:
    """A pass."""
    return [x * x]


def answer(graphs: GraphedPass, *values: float) -> list[float]:
    """Of a pass with one output."""
    return [float(value) for value in graphs(rows(*values))[0].flatten().tolist()]


def replays(fake: FakeDevice) -> int:
    """Of all graphs together."""
    return sum(recording.replays for recording in fake.recordings)


def test_a_shape_is_captured_checked_and_replayed(fake: FakeDevice) -> None:
    """The first pass is eager, the next is compared with an eager one, later ones are replays."""
    passes: list[int] = []

    def counted(x: torch.Tensor) -> list[torch.Tensor]:
        passes.append(len(x))
        return squares(x)

    graphs = GraphedPass(counted, fake)
    assert answer(graphs, 1, 2) == [1, 4]
    assert (len(fake.recordings), replays(fake)) == (1, 0)
    assert answer(graphs, 3, 4) == [9, 16]
    run = len(passes)
    for value in (5.0, -6.0):
        assert answer(graphs, value, 7) == [value**2, 49]
    assert len(passes) == run
    assert replays(fake) == 3
    assert graphs.status == "on"


def test_a_graph_is_not_checked_with_the_inputs_it_was_captured_with(fake: FakeDevice) -> None:
    """A value that the model has put into its Python code would show with others only."""
    passes: list[torch.Tensor] = []

    def stateful(x: torch.Tensor) -> list[torch.Tensor]:
        passes.append(x)
        return [x + min(len(passes), 5)]  # A number in the code, which the capture keeps.

    graphs = GraphedPass(stateful, fake)
    assert answer(graphs, 1) == [2]
    for _ in range(3):
        assert answer(graphs, 1) == [6]
    assert graphs.status == "on"
    assert answer(graphs, 7) == [12]

    def growing(x: torch.Tensor) -> list[torch.Tensor]:
        passes.append(x)
        return [x + len(passes)]

    graphs = GraphedPass(growing, fake)
    answer(graphs, 1)
    assert answer(graphs, 7) == [7 + len(passes)]
    assert graphs.status == "off: a replayed pass answers otherwise than the pass itself"
    before = replays(fake)
    assert answer(graphs, 7) == [7 + len(passes)]
    assert replays(fake) == before


def test_a_replay_that_ignores_its_inputs_is_found(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first batch that is another than the capture's, and not before."""

    class Deaf:
        def replay(self, inputs: Any) -> list[torch.Tensor]:
            return [torch.tensor([[9.0]])]

    monkeypatch.setattr(FakeDevice, "capture", lambda *args: Deaf())
    graphs = GraphedPass(squares, fake)
    assert [answer(graphs, value) for value in (3, 3, 3)] == [[9]] * 3
    assert graphs.status == "on"
    assert answer(graphs, 4) == [16]
    assert graphs.off is not None
    assert answer(graphs, 5) == [25]


def test_random_numbers_are_not_replayed(fake: FakeDevice) -> None:
    """A replay and a pass draw others."""
    graphs = GraphedPass(lambda x: [torch.rand(x.shape)], fake)
    answer(graphs, 1)
    answer(graphs, 2)
    assert graphs.off is not None


def test_non_finite_answers_are_answers(fake: FakeDevice) -> None:
    """An overflow in the batch that a graph is checked with speaks for it, where the pass has it too."""
    graphs = GraphedPass(lambda x: [x / 0], fake)
    answer(graphs, 1, 1, 0)
    assert answer(graphs, -1, 1, 0)[:2] == [-np.inf, np.inf]
    assert graphs.status == "on"


def test_what_cannot_be_captured_runs_as_before(fake: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    """With one line in the log, and the reason in the status."""
    graphs = GraphedPass(lambda x: [x * x.sum().item()], fake)
    for value in (1.0, 2.0, 3.0):
        assert answer(graphs, value) == [value**2]
    assert graphs.status.startswith("off: a pass of 1x1 cannot be captured: NPU function error: waited")
    assert len(caplog.records) == 1
    assert len(fake.recordings) == 1


def test_every_shape_and_dtype_has_its_graph_up_to_a_limit(
    fake: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """The first ones; later shapes run without, and those that are there go on."""
    graphs = GraphedPass(squares, fake, limit=3)
    for values in ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)):
        for _ in range(2):
            assert answer(graphs, *values) == [value**2 for value in values]
    assert len(fake.recordings) == 3
    assert "3 graphs captured" in caplog.text
    before = replays(fake)
    assert answer(graphs, 5) == [25]
    assert replays(fake) == before + 1
    assert graphs([torch.tensor([[1], [2]])])[0].dtype is torch.int64


@pytest.mark.parametrize("before", ["strict", "lossy"])
@pytest.mark.parametrize("after", ["strict", "lossy"])
def test_nothing_is_captured_under_altered_switches(fake: FakeDevice, before: str, after: str) -> None:
    """A graph would keep them for good, and the periodic check reads later ones."""

    def alters(x: torch.Tensor) -> list[torch.Tensor]:
        if len(passes) > 1:  # The eager pass comes first.
            fake.read = {"option": after}
        passes.append(len(x))
        return squares(x)

    passes: list[int] = []
    graphs = GraphedPass(alters, fake)
    fake.read = {"option": before}
    answer(graphs, 1)
    answer(graphs, 2)
    assert (replays(fake) == 1) is (before == after == "strict")


def test_a_lost_device_replays_nothing(fake: FakeDevice) -> None:
    """Nor does it fall back to the pass itself."""
    graphs = GraphedPass(squares, fake)
    answer(graphs, 1)
    answer(graphs, 2)
    fake.poisoned = True
    for value in (3.0, 4.0):
        with pytest.raises(DeviceLost):
            answer(graphs, value)
    assert replays(fake) == 1


def test_the_probe_measures_replays(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they compute as the tier does there are graphs, else not, and the reason is said."""
    spec = PrecisionSpec("fp32")
    tier = convert(nn.Linear(1, 1), spec, fake)

    def forward(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [tier(*inputs)]

    effective = attest(spec, fake).effective
    assert graphed(forward, spec, fake, effective).status == "on"
    assert replays(fake) > 8

    exact: Callable[..., Any] = nn.functional.linear
    monkeypatch.setattr(
        nn.functional, "linear", lambda x, weight, bias: exact(x.half().float(), weight, bias)
    )
    status = graphed(forward, spec, fake, effective).status
    assert (
        status
        == "off: the probe measures fp32-storage-fp16-cube of a replay, and fp32-ieee of the pass itself"
    )


def test_a_probe_that_cannot_be_captured_leaves_graphs_off(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime without graphs, say; the tier serves."""

    def recorder(self: FakeDevice) -> Any:
        raise RuntimeError("feature not supported, error code is 207000")

    monkeypatch.setattr(FakeDevice, "_recorder", recorder)
    graphs = graphed(squares, PrecisionSpec("fp32"), fake, "fp32-ieee")
    assert graphs.status == "off: the probe cannot be captured: feature not supported, error code is 207000"
    assert answer(graphs, 3) == [9]
