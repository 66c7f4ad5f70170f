"""Background batches: what is computed, on whom, and the floor of the reference itself."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compared_tiers import Doubles, Shadowed

from serving.errors import NotReady
from serving.gateway.background import BATCH_ROWS, FLOOR_EVERY, Answered
from serving.tensors import Tensors

Run = Callable[[Callable[[], Any]], Any]


def answered(tier: str, x: list[list[float]], factor: float = 2.0, request_id: str = "r") -> Answered:
    """Rows and what the tier made of them."""
    tensors = {"x": np.array(x, np.float32)}
    return Answered(request_id, tier, tensors, {"y": tensors["x"] * np.float32(factor)})


def far_deadline_s() -> float:
    """Longer than any test."""
    return asyncio.get_running_loop().time() + 60


def test_rows_of_several_requests_make_one_batch(run: Run) -> None:
    """In order, each compared with its own answer."""

    async def scenario() -> None:
        shadowed = Shadowed()
        parts = [answered("fp16", [[1, 2], [3, 4]], 2.5), answered("fp16", [[5, 6]], 3.0)]
        assert await shadowed.batches.compare("fp16", parts, far_deadline_s()) == "compared"
        (batch,) = shadowed.tiers["fp32"].batches
        assert batch["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
        assert shadowed.recorder.figures("fp16", "rel_l2") == pytest.approx([0.25, 0.25, 0.5])

    run(scenario)


def test_a_replica_that_frees_up_in_time_is_waited_for(run: Run) -> None:
    """And one that is lost counts as busy."""

    async def scenario() -> None:
        shadowed = Shadowed()
        shadowed.tiers["fp32"].is_busy = True
        asyncio.get_running_loop().call_later(0.05, setattr, shadowed.tiers["fp32"], "is_busy", False)
        parts = [answered("fp16", [[1, 2]])]
        assert await shadowed.batches.compare("fp16", parts, far_deadline_s()) == "compared"

    run(scenario)


def test_past_the_deadline_rows_are_dropped(run: Run) -> None:
    """Nothing is computed."""

    async def scenario() -> None:
        shadowed = Shadowed()
        now_s = asyncio.get_running_loop().time()
        assert await shadowed.batches.compare("fp16", [answered("fp16", [[1, 2]])], now_s) == "dropped"
        assert not shadowed.tiers["fp32"].batches
        assert not shadowed.recorder.comparisons

    run(scenario)


async def compare_often(shadowed: Shadowed, rows: int, batches: int = FLOOR_EVERY) -> None:
    """That many batches, each of the same numbered rows."""
    x = [[float(row), 1.0] for row in range(rows)]
    for _ in range(batches):
        assert await shadowed.batches.compare("fp16", [answered("fp16", x)], far_deadline_s()) == "compared"


def test_the_floor_is_measured_now_and_then(run: Run) -> None:
    """The same rows in reverse, and the last one twice: another company, another place."""

    async def scenario() -> None:
        shadowed = Shadowed()
        await compare_often(shadowed, rows=3)
        *plain, floor = (batch["x"][:, 0].tolist() for batch in shadowed.tiers["fp32"].batches)
        assert plain == [[0, 1, 2]] * FLOOR_EVERY
        assert floor == [2, 1, 0, 2]
        (comparison,) = shadowed.recorder.floors
        assert comparison.rows == 3
        assert comparison.row_figures()["max_abs"].tolist() == [0, 0, 0]
        assert shadowed.recorder.twin_answers == [True]

    run(scenario)


def test_a_reference_that_wobbles_has_a_floor(run: Run) -> None:
    """Each row is compared with itself, and twins that differ are told."""

    async def scenario() -> None:
        shadowed = Shadowed()

        def by_place(batch: Tensors) -> Tensors:
            # As kernels do that are chosen by the batch's size: here by a row's place in it.
            places = np.arange(len(batch["x"]), dtype=np.float32)[:, None]
            return {"y": batch["x"] * 2 + places / 1000}

        shadowed.tiers["fp32"].answer = by_place
        await compare_often(shadowed, rows=3)
        (comparison,) = shadowed.recorder.floors
        assert comparison.row_figures()["max_abs"] == pytest.approx([2e-3, 0, 2e-3], abs=1e-6)
        assert shadowed.recorder.twin_answers == [False]

    run(scenario)


@pytest.mark.parametrize(
    ("max_rows", "rows", "floor"),
    [
        (8, 8, [7, 6, 5, 4, 3, 2, 1, 7]),
        (4, 4, [3, 2, 1, 3]),
        (2, 2, [1, 1]),
        (1, 1, [0]),
        (64, 8, [7, 6, 5, 4, 3, 2, 1, 7]),
    ],
)
def test_no_batch_is_larger_than_every_tier_takes(
    run: Run, max_rows: int, rows: int, floor: list[int]
) -> None:
    """The floor's neither: then it leaves rows out."""

    async def scenario() -> None:
        shadowed = Shadowed(max_rows=max_rows)
        assert shadowed.batches.rows == min(max_rows, BATCH_ROWS)
        await compare_often(shadowed, rows)
        assert shadowed.tiers["fp32"].batches[-1]["x"][:, 0].tolist() == floor
        assert shadowed.recorder.floors[0].row_figures()["max_abs"].max() == 0
        assert len(shadowed.recorder.twin_answers) == (max_rows > 1)

    run(scenario)


def test_a_floor_that_fails_spoils_no_comparison(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows have been compared already."""

    class NoSingles(Doubles):
        def collate(self, parts: Any) -> Tensors:
            if len(parts) > 2:
                raise TypeError("too many")
            return super().collate(parts)

    async def scenario() -> None:
        shadowed = Shadowed(source=NoSingles())
        await compare_often(shadowed, rows=3)
        assert not shadowed.recorder.floors
        assert len(shadowed.recorder.comparisons) == FLOOR_EVERY

    run(scenario)
    assert "the floor of the reference cannot be measured: TypeError('too many')" in caplog.text


def test_rows_that_the_reference_answered_have_a_floor_too(run: Run) -> None:
    """While a tier is tripped its rows are the reference's own answers."""

    async def scenario() -> None:
        shadowed = Shadowed()
        for _ in range(FLOOR_EVERY):
            await shadowed.batches.compare("fp16", [answered("fp32", [[1, 2], [3, 4]])], far_deadline_s())
        assert len(shadowed.recorder.floors) == 1
        assert len(shadowed.tiers["fp32"].batches) == 1

    run(scenario)


def test_a_tier_can_be_compared_while_it_and_the_reference_serve(run: Run) -> None:
    """Not otherwise."""

    async def scenario() -> None:
        shadowed = Shadowed()
        assert shadowed.batches.can_compare("fp16")
        shadowed.tiers["fp32"].is_ready = False
        assert not shadowed.batches.can_compare("fp16")

    run(scenario)


def test_what_a_tier_answers_is_raised(run: Run) -> None:
    """The caller counts it."""

    async def scenario() -> None:
        shadowed = Shadowed()

        def lost(_: Tensors) -> Tensors:
            raise ZeroDivisionError

        shadowed.tiers["fp32"].answer = lost
        with pytest.raises(ZeroDivisionError):
            await shadowed.batches.compare("fp16", [answered("fp16", [[1, 2]])], far_deadline_s())

        def gone(_: Tensors) -> Tensors:
            raise NotReady("the replica was lost")

        shadowed.tiers["fp32"].answer = gone
        soon_s = asyncio.get_running_loop().time() + 0.05
        assert await shadowed.batches.compare("fp16", [answered("fp16", [[1, 2]])], soon_s) == "dropped"

    run(scenario)


def test_parts_of_one_tier_and_shape_share_a_batch() -> None:
    """Others do not."""
    key = Shadowed().batches.key
    one = answered("fp16", [[1, 2]])
    assert key(one) == key(answered("fp16", [[3, 4], [5, 6]], request_id="s"))
    assert key(one) != key(answered("fp32", [[1, 2]]))
    assert key(one) != key(answered("fp16", [[1, 2, 3]]))
