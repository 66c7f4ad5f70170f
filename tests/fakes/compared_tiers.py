"""Tiers, and a recorder, for tests of what compares them: in memory, and as idle as a test says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from serving.config import Divergence
from serving.divergence.comparison import Comparison, OutputComparator
from serving.divergence.formats import FP16
from serving.errors import NotReady
from serving.gateway.background import Answered, BackgroundBatches
from serving.gateway.captures import CaptureFolder
from serving.gateway.shadow import Shadow
from serving.models.source import ModelSource
from serving.tensors import Signature, Tensors, TensorSpec

SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2), "regression"),))


class Doubles(ModelSource):
    """Two numbers in, their doubles out."""

    signature = SIGNATURE

    def build(self) -> Any:
        """Never here."""
        raise NotImplementedError

    def examples(self) -> Tensors:
        """Nobody asks."""
        raise NotImplementedError


class FakeTier:
    """Computes at once, or refuses while it is busy; `answer` may be replaced."""

    def __init__(self, factor: float = 2.0) -> None:
        self.answer: Callable[[Tensors], Any] = lambda batch: {"y": batch["x"] * np.float32(factor)}
        self.is_ready = True
        self.is_busy = False
        #: Every batch that it computed.
        self.batches: list[Tensors] = []

    async def run_background(self, batch: Tensors) -> Tensors:
        """Compute a batch if idle."""
        await asyncio.sleep(0)
        if self.is_busy:
            raise NotReady("busy")
        self.batches.append(batch)
        outputs: Tensors = self.answer(batch)
        return outputs


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.comparisons: list[tuple[str, Comparison]] = []
        self.floors: list[Comparison] = []
        self.twin_answers: list[bool] = []
        #: (tier, outcome) -> rows.
        self.rows: Counter[tuple[str, str]] = Counter()

    def compared(self, tier: str, comparison: Comparison) -> None:
        self.comparisons.append((tier, comparison))

    def floor(self, comparison: Comparison) -> None:
        self.floors.append(comparison)

    def twins(self, agree: bool) -> None:
        self.twin_answers.append(agree)

    def outcome(self, tier: str, rows: int, outcome: str) -> None:
        self.rows[tier, outcome] += rows

    def figures(self, tier: str, metric: str) -> list[float]:
        """A tier's figures, in the order in which they came."""
        return [
            figure
            for name, comparison in self.comparisons
            if name == tier
            for figure in comparison.row_figures()[metric].tolist()
        ]

    def total(self, tier: str) -> int:
        """Rows of a tier that something became of."""
        return sum(rows for (name, _), rows in self.rows.items() if name == tier)


class Shadowed:
    """The tiers `fp32`, `mixed` and `fp16`, and their shadow."""

    def __init__(
        self,
        *,
        source: ModelSource | None = None,
        signature: Signature = SIGNATURE,
        max_rows: int = 64,
        captures: CaptureFolder | None = None,
        **divergence: Any,
    ) -> None:
        self.tiers = {"fp32": FakeTier(2.0), "mixed": FakeTier(2.0001), "fp16": FakeTier(2.001)}
        self.recorder = Recorder()
        config = Divergence.model_validate({"sample": 1.0, **divergence})
        self.batches = BackgroundBatches(
            self.tiers,
            "fp32",
            source=source or Doubles(),
            compare=OutputComparator(signature.outputs, {"fp16": FP16, "mixed": FP16}, {}),
            recorder=self.recorder,
            max_rows=max_rows,
            captures=captures,
        )
        self.shadow = Shadow(config, self.batches, ["mixed", "fp16"], self.recorder)

    def answer(
        self,
        request_id: str,
        tier: str,
        x: Sequence[Sequence[float]],
        passed_over: Sequence[str] = (),
        more: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """A request that `tier` answered."""
        tensors = {"x": np.array(x, np.float32).reshape(-1, 2)}
        outputs = self.tiers[tier].answer(tensors) | dict(more or {})
        self.shadow.offer(Answered(request_id, tier, tensors, outputs), passed_over)

    async def until_done(self) -> None:
        """Compare until nothing is left."""
        task = asyncio.get_running_loop().create_task(self.shadow.run())
        try:
            await asyncio.sleep(0)
            while self.shadow.held != (0, 0):
                assert not task.done(), task.exception()
                await asyncio.sleep(0.001)
            # A failure right at the end is one too.
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
