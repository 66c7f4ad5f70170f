"""Sampled rows wait within bounds, and something becomes of each of them, once."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compared_tiers import Doubles, Shadowed
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gateway.background import Answered
from serving.gateway.sampling import sampled_rows
from serving.tensors import Tensors

Run = Callable[[Callable[[], Any]], Any]
ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_rows_that_a_tier_answered_go_to_the_reference(run: Run) -> None:
    """Each once, the same to the bit."""

    async def scenario() -> None:
        shadowed = Shadowed()
        shadowed.answer("r", "fp16", ROWS)
        await shadowed.until_done()
        assert [batch["x"].tolist() for batch in shadowed.tiers["fp32"].batches] == [ROWS]
        assert shadowed.tiers["fp16"].batches == []
        assert shadowed.recorder.figures("fp16", "rel_l2") == pytest.approx([5e-4] * 3, rel=1e-3)
        assert dict(shadowed.recorder.rows) == {("fp16", "compared"): 3}

    run(scenario)


def test_rows_that_the_reference_answered_are_not_compared(run: Run) -> None:
    """Nobody was passed over."""

    async def scenario() -> None:
        shadowed = Shadowed()
        shadowed.answer("r", "fp32", ROWS)
        await shadowed.until_done()
        assert not shadowed.recorder.rows

    run(scenario)


def test_a_tier_that_was_passed_over_is_compared(run: Run) -> None:
    """It computes what the reference answered: so it can recover."""

    async def scenario() -> None:
        shadowed = Shadowed()
        shadowed.answer("r", "fp32", ROWS, passed_over=["fp16"])
        await shadowed.until_done()
        assert [batch["x"].tolist() for batch in shadowed.tiers["fp16"].batches] == [ROWS]
        assert shadowed.tiers["fp32"].batches == []
        assert shadowed.recorder.figures("fp16", "rel_l2") == pytest.approx([5e-4] * 3, rel=1e-3)

    run(scenario)


def test_with_a_third_tier_between_both_are_compared(run: Run) -> None:
    """The one that answered, and the one that it answered for: both against the reference."""

    async def scenario() -> None:
        shadowed = Shadowed()
        shadowed.answer("r", "mixed", ROWS, passed_over=["fp16"])
        await shadowed.until_done()
        assert dict(shadowed.recorder.rows) == {("fp16", "compared"): 3, ("mixed", "compared"): 3}
        assert shadowed.recorder.figures("fp16", "rel_l2") == pytest.approx([5e-4] * 3, rel=1e-3)
        assert shadowed.recorder.figures("mixed", "rel_l2") == pytest.approx([5e-5] * 3, rel=1e-2)

    run(scenario)


def test_only_the_sample_is_compared(run: Run) -> None:
    """Those rows that the request's id chooses."""

    async def scenario() -> None:
        shadowed = Shadowed(sample=0.3)
        x = np.arange(200.0).reshape(100, 2)
        shadowed.answer("some-id", "fp16", x.tolist())
        await shadowed.until_done()
        chosen = sampled_rows("some-id", 100, 0.3)
        computed = np.concatenate([batch["x"] for batch in shadowed.tiers["fp32"].batches if len(batch["x"])])
        assert 0 < len(chosen) < 100
        assert {tuple(row) for row in computed.tolist()} == {tuple(row) for row in x[chosen].tolist()}
        assert shadowed.recorder.rows["fp16", "compared"] == len(chosen)

    run(scenario)


def test_rows_are_copied(run: Run) -> None:
    """Neither do they keep a request alive, nor can somebody change them."""

    async def scenario() -> None:
        shadowed = Shadowed()
        tensors = {"x": np.array(ROWS, np.float32)}
        outputs = {"y": tensors["x"] * 2}
        shadowed.shadow.offer(Answered("r", "fp16", tensors, outputs))
        await asyncio.sleep(0)
        tensors["x"][:] = 0
        outputs["y"][:] = 0
        await shadowed.until_done()
        assert shadowed.recorder.figures("fp16", "max_abs") == [0.0] * 3

    run(scenario)


def test_nothing_waits_beyond_the_bounds(run: Run) -> None:
    """Rows, and bytes: what does not fit is dropped, and counted."""

    async def scenario() -> None:
        for limits, rows in (({"max_rows": 10}, 10), ({"max_bytes": 1024}, 64)):
            shadowed = Shadowed(shadow=limits)
            for number in range(100):
                shadowed.answer(f"r{number}", "fp16", [[number, 1.0]])
            await asyncio.sleep(0)
            assert shadowed.shadow.held[0] == rows
            assert shadowed.recorder.rows["fp16", "dropped"] == 100 - rows
            await shadowed.until_done()
            assert shadowed.recorder.rows["fp16", "compared"] == rows

    run(scenario)


def test_text_counts_with_its_length(run: Run) -> None:
    """And not as the pointers that numpy sees."""

    async def scenario() -> None:
        shadowed = Shadowed(shadow={"max_bytes": 100_000})
        text = np.array([b"x" * 60_000], object)
        for number in range(3):
            tensors = {"x": np.ones((1, 2), np.float32)}
            shadowed.shadow.offer(Answered(f"r{number}", "fp16", tensors, {"y": text}))
        await asyncio.sleep(0)
        assert shadowed.recorder.rows["fp16", "dropped"] == 2
        shadowed.tiers["fp32"].answer = lambda batch: {"y": text}
        await shadowed.until_done()
        assert shadowed.recorder.rows["fp16", "compared"] == 1

    run(scenario)


def test_huge_rows_come_in_smaller_batches(run: Run) -> None:
    """Eight of them would fill the memory that all may take, and never be compared."""

    async def scenario() -> None:
        shadowed = Shadowed(shadow={"max_bytes": 4_000_000})
        for number in range(4):
            wide = np.ones((8, 2, 50_000), np.float32)  # 400 kB a row, and as much in its answer
            shadowed.shadow.offer(Answered(f"r{number}", "fp16", {"x": wide}, {"y": wide * 2}))
            await shadowed.until_done()
        assert shadowed.recorder.rows["fp16", "compared"] > 0
        # Two where the floor has a row twice.
        assert max(len(batch["x"]) for batch in shadowed.tiers["fp32"].batches) <= 2

    run(scenario)


def test_a_row_for_which_nobody_is_idle_is_dropped(run: Run) -> None:
    """After a while, whether it waits in the queue or for a replica."""

    async def scenario() -> None:
        shadowed = Shadowed(shadow={"max_age_s": 0.05})
        shadowed.tiers["fp32"].is_busy = True
        for number in range(30):
            shadowed.answer(f"r{number}", "fp16", [[number, 1.0]])
        await shadowed.until_done()
        assert dict(shadowed.recorder.rows) == {("fp16", "dropped"): 30}
        shadowed.tiers["fp32"].is_busy = False
        shadowed.answer("later", "fp16", ROWS)
        await shadowed.until_done()
        assert shadowed.recorder.rows["fp16", "compared"] == 3

    run(scenario)


def test_a_busy_tier_keeps_no_other_waiting(run: Run) -> None:
    """Each has a queue of its own."""

    async def scenario() -> None:
        shadowed = Shadowed(shadow={"max_age_s": 5})
        shadowed.tiers["fp16"].is_busy = True
        task = asyncio.get_running_loop().create_task(shadowed.shadow.run())
        shadowed.answer("one", "fp32", ROWS, passed_over=["fp16"])
        shadowed.answer("other", "mixed", ROWS)
        while not shadowed.recorder.rows:  # noqa: ASYNC110  Many steps of other tasks.
            await asyncio.sleep(0.001)
        assert dict(shadowed.recorder.rows) == {("mixed", "compared"): 3}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scenario)


@pytest.mark.parametrize("lost", ["fp32", "fp16"])
def test_rows_of_a_tier_that_does_not_serve_are_dropped_at_once(run: Run, lost: str) -> None:
    """They would fill the room of tiers that do."""

    async def scenario() -> None:
        shadowed = Shadowed()
        shadowed.tiers[lost].is_ready = False
        shadowed.answer("r", "fp16", ROWS)
        await asyncio.sleep(0)
        assert shadowed.shadow.held == (0, 0)
        assert dict(shadowed.recorder.rows) == {("fp16", "dropped"): 3}

    run(scenario)


def test_a_failure_ends_only_its_own_rows(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Models' code may raise anything, in any batch. It is said once, not for every batch."""

    async def scenario() -> None:
        shadowed = Shadowed()
        good = shadowed.tiers["fp32"].answer

        def fail(_: Tensors) -> Tensors:
            raise SystemError("no such thing")

        for answer, outcome in ((fail, "failed"), (good, "compared"), (lambda _: {}, "failed")):
            before = shadowed.recorder.rows["fp16", outcome]
            shadowed.tiers["fp32"].answer = answer
            for number in range(20):
                shadowed.answer(f"r{number}", "fp16", ROWS)
            shadowed.tiers["fp32"].answer = answer
            await shadowed.until_done()
            assert shadowed.recorder.rows["fp16", outcome] == before + 60

    run(scenario)
    said = [record.getMessage() for record in caplog.records if "cannot be compared" in record.getMessage()]
    assert len(said) == 2
    assert "SystemError('no such thing')" in said[0]


def test_a_model_whose_key_fails_is_counted(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Its callers have their answers."""

    class Keyless(Doubles):
        def batch_key(self, tensors: Tensors) -> object:
            raise KeyError("no key")

    async def scenario() -> None:
        shadowed = Shadowed(source=Keyless())
        shadowed.answer("r", "fp16", ROWS)
        await asyncio.sleep(0)
        assert dict(shadowed.recorder.rows) == {("fp16", "failed"): 3}
        assert shadowed.shadow.held == (0, 0)

    run(scenario)
    assert "rows of request r cannot be sampled" in caplog.text


def test_a_guard_s_flags_are_no_output(run: Run) -> None:
    """They are neither kept nor compared."""

    async def scenario() -> None:
        shadowed = Shadowed()
        flags = {"#overflow": np.zeros(3, np.uint8)}
        shadowed.answer("r", "fp16", ROWS, more=flags)
        plain = shadowed.tiers["fp16"].answer
        shadowed.tiers["fp16"].answer = lambda batch: plain(batch) | {"#overflow": np.zeros(len(batch["x"]))}
        shadowed.answer("s", "fp32", ROWS, passed_over=["fp16"])
        await shadowed.until_done()
        assert shadowed.recorder.rows["fp16", "compared"] == 6

    run(scenario)


OFFERS = st.lists(
    st.tuples(
        st.sampled_from(["fp16", "mixed", "fp32"]),
        st.sampled_from([(), ("fp16",), ("fp16", "mixed")]),
        st.integers(1, 20),
        st.sampled_from(["idle", "busy", "failing", "gone"]),
    ),
    max_size=12,
)


@settings(max_examples=40)
@given(OFFERS, st.integers(1, 9), st.integers(1, 60))
def test_every_sampled_row_has_one_outcome(
    run: Run, offers: list[Any], batch_rows: int, max_rows: int
) -> None:
    """Whatever is offered, whoever is busy, lost or broken; the bounds hold all the time."""

    async def scenario() -> None:
        shadowed = Shadowed(sample=0.7, max_rows=batch_rows, shadow={"max_rows": max_rows, "max_age_s": 0.03})
        good = shadowed.tiers["fp32"].answer
        task = asyncio.get_running_loop().create_task(shadowed.shadow.run())
        wanted = dict.fromkeys(("fp16", "mixed"), 0)

        def fail(_: Tensors) -> Tensors:
            raise ValueError("broken")

        reference = shadowed.tiers["fp32"]
        for number, (tier, cheaper, rows, state) in enumerate(offers):
            passed_over = [one for one in cheaper if one != tier]
            shadowed.answer(f"r{number}", tier, np.ones((rows, 2)).tolist(), passed_over)
            for compared in {tier, *passed_over} - {"fp32"}:
                wanted[compared] += len(sampled_rows(f"r{number}", rows, 0.7))
            reference.is_busy, reference.is_ready = state == "busy", state != "gone"
            reference.answer = fail if state == "failing" else good
            for _ in range(number % 4):
                await asyncio.sleep(0.001)
            assert 0 <= shadowed.shadow.held[0] <= max_rows
            reference.answer = good  # The test's own answers come of it too.
        reference.is_busy, reference.is_ready = False, True
        await asyncio.sleep(0)
        while shadowed.shadow.held != (0, 0):  # noqa: ASYNC110  Many steps of other tasks.
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for tier, rows in wanted.items():
            assert shadowed.recorder.total(tier) == rows
            assert len(shadowed.recorder.figures(tier, "rel_l2")) == shadowed.recorder.rows[tier, "compared"]
        for some in shadowed.tiers.values():
            assert all(len(batch["x"]) <= batch_rows for batch in some.batches)

    run(scenario)
