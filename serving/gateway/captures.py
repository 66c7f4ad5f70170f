"""The worst rows of each window, kept in a folder of bounded size."""

from __future__ import annotations

import contextlib
import datetime as dt
import heapq
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from serving.config import CaptureConfig
from serving.divergence.capture import Capture, CaptureFacts, can_be_captured
from serving.divergence.comparison import Comparison
from serving.gateway.tier_client import TierDescription
from serving.tensors import Tensors, slice_rows

logger = logging.getLogger("halftone.precision")

SUFFIX = ".safetensors"
#: Of a file that is being written, or that a gateway was killed over.
UNFINISHED = ".part"
_PACKAGES = ("halftone-serving", "torch", "torch_npu", "numpy", "ray")


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """Rows that were compared."""

    #: Of each row's request.
    request_ids: Sequence[str]
    #: Model tensors, [rows, ...].
    batch: Tensors
    #: The tier's outputs, and the reference's, [rows, ...].
    found: Tensors
    wanted: Tensors

    def row(self, row: int) -> ComparedRows:
        """One of them."""
        parts = (slice_rows(some, row, row + 1) for some in (self.batch, self.found, self.wanted))
        return ComparedRows([self.request_ids[row]], *parts)


class CaptureFolder:
    """Writes captures of one model. Its methods run on a worker thread, one at a time."""

    def __init__(
        self,
        config: CaptureConfig,
        *,
        model: str,
        reference: str,
        metric: str,
        window: int,
        describe: Callable[[], Mapping[str, TierDescription | None]],
    ) -> None:
        """`metric`: what makes a row bad; `window`: rows in which the worst are looked for."""
        self._config = config
        self._model = model
        self._reference = reference
        self._metric = metric
        self._window = window
        self._describe = describe
        #: By tier: the window's worst rows so far, the least bad of them first.
        self._worst: dict[str, list[tuple[float, int, Path]]] = {}
        self._seen: dict[str, int] = {}
        self._numbers = itertools.count()
        self._said: set[str] = set()

    def consider(self, tier: str, rows: ComparedRows, comparison: Comparison) -> None:
        """Keep those rows of a tier that are among the worst of their window. Failures are only said."""
        if not can_be_captured(rows.batch, rows.found, rows.wanted):
            self._warn("rows with text cannot be captured")
            return
        figures = comparison.row_figures()
        for row, figure in enumerate(figures[self._metric].tolist()):
            if not self._is_among_worst(tier, figure):
                continue
            known = {metric: _or_none(values[row]) for metric, values in figures.items()}
            capture = self._capture(tier, rows.row(row), known, comparison.row_verdict(row))
            try:
                self._keep(tier, figure, capture)
            except OSError as error:
                self._warn(f"a capture cannot be written: {error}")

    def _warn(self, message: str) -> None:
        """Say it once: it would be said for every row."""
        if message not in self._said:
            self._said.add(message)
            logger.warning("model %s: %s", self._model, message)

    def _is_among_worst(self, tier: str, figure: float) -> bool:
        self._seen[tier] = self._seen.get(tier, 0) + 1
        if self._seen[tier] > self._window:
            self._seen[tier] = 1
            self._worst[tier] = []
        worst = self._worst.setdefault(tier, [])
        least = worst[0][0] if len(worst) >= self._config.rows else 0.0
        return figure > least  # NaN is not.

    def _capture(
        self, tier: str, row: ComparedRows, figures: Mapping[str, float | None], verdict: str
    ) -> Capture:
        described = self._describe()
        redacted = self._redacted(row.batch)
        facts = CaptureFacts(
            model=self._model,
            tier=tier,
            reference=self._reference,
            request_id=row.request_ids[0],
            captured_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            figures=figures,
            verdict=verdict,
            versions=_versions(),
            tiers={name: _described(described.get(name)) for name in (tier, self._reference)},
            redacted=redacted,
        )
        kept = {name: array for name, array in row.batch.items() if name not in redacted}
        return Capture(facts, kept, row.found, row.wanted)

    def _redacted(self, batch: Tensors) -> tuple[str, ...]:
        """The model tensors to leave out: all, where a name is none of theirs.

        Then it names a request's input, and what preprocessing made of that cannot be told.
        """
        if set(self._config.redact) <= set(batch):
            return self._config.redact
        return tuple(batch)

    def _keep(self, tier: str, figure: float, capture: Capture) -> None:
        """Write a capture, and remove what it displaces."""
        number = next(self._numbers)
        folder = self._config.folder
        path = folder / f"{self._model}-{tier}-{os.getpid()}-{number:06d}{SUFFIX}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(UNFINISHED)
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(capture.encode())
        unfinished.replace(path)
        worst = self._worst[tier]
        heapq.heappush(worst, (figure, number, path))
        if len(worst) > self._config.rows:
            heapq.heappop(worst)[2].unlink(missing_ok=True)
        self._make_room()

    def _make_room(self) -> None:
        """Remove the oldest captures until the folder is within its limit."""
        files = []
        for file in self._config.folder.iterdir():
            if file.suffix in {SUFFIX, UNFINISHED}:
                with contextlib.suppress(FileNotFoundError):  # Other gateways make room here too.
                    files.append((file.stat(), file))
        files.sort(key=lambda entry: entry[0].st_mtime_ns)
        size_bytes = sum(status.st_size for status, _ in files)
        for status, file in files:
            if size_bytes <= self._config.max_bytes:
                return
            file.unlink(missing_ok=True)
            size_bytes -= status.st_size


def _or_none(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return float(value) if math.isfinite(value) else None


def _described(description: TierDescription | None) -> dict[str, Any]:
    if description is None:
        return {}
    known = asdict(description)
    return {key: known[key] for key in ("device", "soc", "effective", "kept_fp32", "switches", "measured")}


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
