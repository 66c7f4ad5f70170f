"""A pass captured and replayed, on the CPU behind a stream: whose memory, whose answers, and faults.

The graphs of CUDA are not run anywhere here; those of torch_npu are, on the simulated card.
"""

import numpy as np
import pytest
import torch
from streamed_device import FakeDevice, Recording

from serving.numerics.devices import CaptureFailed, Device, DeviceLost, DeviceOutOfMemory, Graph


@pytest.fixture
def fake() -> FakeDevice:
    """A healthy one, with graphs."""
    return FakeDevice()


def doubled(x: torch.Tensor) -> list[torch.Tensor]:
    """A pass."""
    return [x * 2, x.sum(dim=0)]


def ones(rows: int = 3) -> torch.Tensor:
    """X [rows, 2]."""
    return torch.ones(rows, 2)


def captured(fake: FakeDevice) -> tuple[Graph, Recording]:
    """A graph of `doubled`."""
    graph = fake.capture(doubled, [ones()])
    return graph, fake.recordings[-1]


def test_a_cpu_has_no_graphs(device: Device) -> None:
    """And says so."""
    assert not device.has_graphs
    with pytest.raises(CaptureFailed, match="has no graphs"):
        device.capture(doubled, [ones()])


def test_a_replay_computes_the_pass_on_other_inputs(fake: FakeDevice) -> None:
    """From memory of its own: neither the capture's nor a replay's inputs are written to."""
    graph, recording = captured(fake)
    for value in (3.0, -1.0):
        x = ones() * value
        doubles, total = graph.replay([x])
        assert (doubles == 2 * value).all()
        assert (total == 3 * value).all()
        assert (x == value).all()
    assert recording.replays == 2


def test_outputs_are_overwritten_by_the_next_replay(fake: FakeDevice) -> None:
    """Which is why they are copied to the host first."""
    graph, _ = captured(fake)
    first = graph.replay([ones()])[0]
    host = fake.to_host(first)
    graph.replay([5 * ones()])
    assert (first == 10).all()
    assert (host == 2).all()


def test_a_replay_that_was_dropped_is_found(fake: FakeDevice) -> None:
    """Its outputs would be those of the batch before: nothing leaves, and the device is given up."""
    graph, recording = captured(fake)
    graph.replay([ones()])
    recording.calls.clear()
    with pytest.raises(DeviceLost, match="did not replay"):
        graph.replay([5 * ones()])
    assert fake.poisoned
    with pytest.raises(DeviceLost, match="takes no more work"):
        graph.replay([ones()])


def test_the_counter_starts_again(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never overflows."""
    monkeypatch.setattr("serving.numerics.devices.graphs._LAST_COUNT", 2)
    graph, _ = captured(fake)
    for value in range(5):
        assert (graph.replay([ones() * value])[0] == 2 * value).all()


def test_a_fault_in_a_replay_ends_the_device(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fault in a pass does."""
    graph, recording = captured(fake)

    def fault() -> None:
        raise RuntimeError("replay: NPU function error: AclmdlRIExecuteAsync, error code is 507015")

    monkeypatch.setattr(recording, "replay", fault)
    with pytest.raises(DeviceLost):
        graph.replay([ones()])
    assert fake.poisoned


def test_a_pass_that_waits_for_a_value_cannot_be_captured(fake: FakeDevice) -> None:
    """The runtime's own refusal is no fault of the device."""
    with pytest.raises(CaptureFailed, match="waited while capturing"):
        fake.capture(lambda x: [x * x.sum().item()], [ones()])
    assert not fake.poisoned
    assert fake.to_host(ones()).tolist() == [[1, 1]] * 3


def test_the_first_error_of_a_capture_is_told(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending a spoilt capture raises again; that says less."""
    end = Recording.__exit__

    def ends_badly(self: Recording, *error: object) -> None:
        end(self, *error)
        raise RuntimeError("capture_end failed")

    monkeypatch.setattr(Recording, "__exit__", ends_badly)
    with pytest.raises(CaptureFailed, match="waited while capturing"):
        fake.capture(lambda x: [x * x.sum().item()], [ones()])


def test_a_device_that_fails_during_a_capture_is_lost(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It no longer computes a known product."""
    monkeypatch.setattr(FakeDevice, "healthy", lambda self: False)
    with pytest.raises(DeviceLost):
        fake.capture(lambda x: [x * x.sum().item()], [ones()])


def test_a_capture_may_run_out_of_memory(fake: FakeDevice) -> None:
    """Memory is given back, and the device goes on."""
    passes = 0

    def too_large(x: torch.Tensor) -> list[torch.Tensor]:
        nonlocal passes
        passes += 1
        if passes > 3:  # After the passes before the capture.
            raise torch.OutOfMemoryError("out of memory")
        return [x]

    with pytest.raises(DeviceOutOfMemory):
        fake.capture(too_large, [ones()])
    assert fake.released == 1
    assert not fake.poisoned
    assert np.array_equal(fake.to_host(ones()), np.ones((3, 2)))


def test_a_pass_runs_before_it_is_captured(fake: FakeDevice) -> None:
    """Libraries choose kernels then; and a failure then is the pass's own."""
    with pytest.raises(ZeroDivisionError):
        fake.capture(lambda x: [x * (1 // 0)], [ones()])
    assert fake.recordings == []
