"""Growth is told from wobble."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.growth import BOUNDS, Figures, Growth, Watch, growths
from loadtests.growth.figures import _TITLE, SERVE, Sample
from loadtests.growth.task_count import note_tasks, tasks_of
from loadtests.growth.trend import fit


def samples(resident_mib: list[float], tasks: int | None = 3) -> list[Sample]:
    """One process, a sample a second."""
    return [
        Sample(float(at_s), {"gateway 1": Figures(value, 20, 30, tasks)}, frozenset())
        for at_s, value in enumerate(resident_mib)
    ]


def growing(found: list[Growth]) -> set[str]:
    """Which figures do."""
    return {growth.figure for growth in found if growth.grows}


def test_a_steady_leak_is_found_through_noise() -> None:
    """Half as much again as its bound, in noise as large as the bound."""
    random = np.random.default_rng(0)
    noise = random.uniform(0, BOUNDS["resident_mib"], 200)
    assert growing(growths(samples(list(100 + noise)), 0)) == set()
    leak = np.linspace(0, 1.5 * BOUNDS["resident_mib"], 200)
    assert growing(growths(samples(list(100 + noise + leak)), 0)) == {"resident_mib"}


def test_a_leak_in_steps_is_found() -> None:
    """As arenas grow: nothing for a while, then much at once."""
    steps = [100 + 5.0 * (second // 20) for second in range(100)]
    assert growing(growths(samples(steps), 0)) == {"resident_mib"}


def test_a_spike_and_the_warm_up_do_not_count() -> None:
    """A few samples far off; and growth that ends with the warm-up."""
    spiky = [100.0 + 500 * (second in {90, 98, 99}) for second in range(100)]
    assert growing(growths(samples(spiky), 0)) == set()
    warming = [min(second, 50) * 10.0 for second in range(200)]
    assert growing(growths(samples(warming), 50)) == set()
    assert growing(growths(samples(warming), 0)) == {"resident_mib"}


def test_a_leak_that_begins_late_is_found() -> None:
    """In the last third of the run."""
    late = [100.0 + max(0, second - 70) for second in range(100)]
    assert growing(growths(samples(late), 0)) == {"resident_mib"}


def test_what_is_not_known_is_not_judged() -> None:
    """Tasks, where no watched model counts them."""
    assert {growth.figure for growth in growths(samples([1.0] * 10, None), 0)} == {
        "resident_mib",
        "descriptors",
        "threads",
    }


def test_a_process_that_came_or_went_and_too_few_samples_are_refused() -> None:
    """Neither shows that nothing grows."""
    found = samples([1.0] * 10)
    found[7] = Sample(7.0, {}, frozenset())
    with pytest.raises(ValueError, match="gateway 1"):
        growths(found, 0)
    with pytest.raises(ValueError, match="too few"):
        growths(samples([1.0] * 10), 8)
    with pytest.raises(ValueError, match="too few"):
        growths([], 0)


@given(
    first=st.floats(-1e6, 1e6),
    slope=st.floats(0, 1e3),
    times=st.lists(st.integers(0, 10_000), min_size=5, max_size=50, unique=True).map(sorted),
)
def test_a_straight_line_is_fitted_by_itself(first: float, slope: float, times: list[int]) -> None:
    """To rounding, where it does not fall."""
    moments = np.array(times, float)
    line = first + slope * moments
    assert fit(moments, line) == pytest.approx((line[0], line[-1]), abs=1e-3)


def test_a_look_at_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one: its memory, descriptors and threads, and the tasks that it noted."""
    note_tasks(tmp_path, 7)
    monkeypatch.setattr(Watch, "_series", lambda _: frozenset({"a"}))
    watch = Watch("http://127.0.0.1:1", os.getpid(), tmp_path, interval_s=0.01)
    with watch.running():
        pass
    assert not watch.failures
    figures = watch.samples[-1].processes[SERVE]
    assert figures.resident_mib > 1
    assert figures.descriptors > 2
    assert figures.threads >= 1
    assert figures.tasks == 7
    assert tasks_of(tmp_path, 1) is None


def test_a_server_that_does_not_answer_is_a_failure_of_the_watch(tmp_path: Path) -> None:
    """It is told, not passed over."""
    watch = Watch("http://127.0.0.1:1", os.getpid(), tmp_path)
    with watch.running():
        pass
    assert watch.failures


@pytest.mark.parametrize(
    "title", ["ray::ServeReplica:halftone:m:fp16", "ray::ServeReplica:halftone:m:fp16.check_health"]
)
def test_a_process_keeps_its_name_while_ray_runs_a_method(title: str) -> None:
    """Ray appends the method's name to the title, for as long as it runs."""
    found = _TITLE.search(title)
    assert found is not None
    assert found[0] == "halftone:m:fp16"
