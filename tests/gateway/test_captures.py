"""The folder of the worst rows: which are kept, how much room they take, and what is left out."""

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.config import CaptureConfig
from serving.divergence.capture import read_capture
from serving.divergence.comparison import OutputComparator
from serving.divergence.formats import FP16
from serving.gateway.captures import CaptureFolder, ComparedRows
from serving.gateway.tier_client import TierDescription
from serving.tensors import TensorSpec

COMPARE = OutputComparator((TensorSpec("y", "FP32", (-1, 2)),), {"fp16": FP16}, {})
DESCRIBED = {
    "fp16": TierDescription("cpu", "chip", "fp16-emulated", ("head",), switches={"matmul": "highest"}),
    "fp32": None,
}


def made(folder: Path, *, window: int = 100, metric: str = "rel_l2", **config: Any) -> CaptureFolder:
    """A folder for the model `m`."""
    return CaptureFolder(
        CaptureConfig.model_validate({"folder": folder, **config}),
        model="m",
        reference="fp32",
        metric=metric,
        window=window,
        describe=lambda: DESCRIBED,
    )


def consider(folder: CaptureFolder, errors: list[float], tier: str = "fp16", **batch: np.ndarray) -> None:
    """Rows that are off by these shares of the reference's answer, [1, 1]; row i is of request `r<i>`."""
    rows = len(errors)
    wanted = {"y": np.ones((rows, 2), np.float32)}
    found = {"y": (1 + np.array(errors, np.float32))[:, None] * wanted["y"]}
    tensors = batch or {"x": np.arange(rows, dtype=np.float32)[:, None]}
    ids = [f"r{row}" for row in range(rows)]
    folder.consider(tier, ComparedRows(ids, tensors, found, wanted), COMPARE(tier, found, wanted))


def kept(folder: Path) -> list[float]:
    """The figures of what is in the folder, ascending."""
    figures = [read_capture(file).facts.figures["rel_l2"] for file in folder.iterdir()]
    return sorted(round(figure, 4) for figure in figures if figure is not None)


def test_the_worst_rows_are_kept(tmp_path: Path) -> None:
    """Of the window, however they come."""
    folder = made(tmp_path / "captures", rows=2)
    consider(folder, [0.1, 0.5, 0.2])
    consider(folder, [0.3, 0.01])
    assert kept(tmp_path / "captures") == [0.3, 0.5]


def test_each_window_and_tier_has_its_own(tmp_path: Path) -> None:
    """A new window begins with none."""
    folder = made(tmp_path, rows=1, window=3)
    consider(folder, [0.5, 0.1, 0.2])
    consider(folder, [0.1, 0.2])
    consider(folder, [0.3], tier="mixed")
    assert kept(tmp_path) == [0.2, 0.3, 0.5]


def test_rows_that_agree_are_not_kept(tmp_path: Path) -> None:
    """There is nothing to see."""
    consider(made(tmp_path), [0.0, 0.0])
    assert kept(tmp_path) == []


def test_a_row_without_a_figure_is_not_kept(tmp_path: Path) -> None:
    """The metric does not apply to it."""
    folder = made(tmp_path, metric="cosine_distance")
    one = {"y": np.ones((1, 1), np.float32)}
    compare = OutputComparator((TensorSpec("y", "FP32", (-1, 1)),), {}, {})
    rows = ComparedRows(["r"], {"x": np.ones((1, 1))}, {"y": one["y"] * 2}, one)
    folder.consider("fp16", rows, compare("fp16", {"y": one["y"] * 2}, one))
    assert list(tmp_path.iterdir()) == []


def test_a_capture_tells_all_that_is_known(tmp_path: Path) -> None:
    """Row, answers, request, figures, verdict, versions and what the tiers found themselves to be."""
    consider(made(tmp_path, rows=1), [0.1, 0.5])
    (file,) = tmp_path.iterdir()
    capture = read_capture(file)
    assert capture.inputs["x"].tolist() == [[1.0]]
    assert capture.tier_outputs["y"].tolist() == [[1.5, 1.5]]
    assert capture.reference_outputs["y"].tolist() == [[1.0, 1.0]]
    facts = capture.facts
    assert (facts.model, facts.tier, facts.reference, facts.request_id) == ("m", "fp16", "fp32", "r1")
    assert facts.verdict == "fail"
    assert facts.figures["rel_l2"] == pytest.approx(0.5)
    assert facts.versions["numpy"] == np.__version__
    assert facts.tiers["fp16"]["effective"] == "fp16-emulated"
    assert facts.tiers["fp16"]["switches"] == {"matmul": "highest"}
    assert facts.tiers["fp32"] == {}


def test_a_row_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    """Its figures are null: JSON has no infinity."""
    consider(made(tmp_path, rows=1), [0.5, np.nan, 0.7])
    (file,) = tmp_path.iterdir()
    facts = read_capture(file).facts
    assert facts.request_id == "r1"
    assert facts.figures["rel_l2"] is None


def test_the_folder_is_private_and_bounded(tmp_path: Path) -> None:
    """The oldest make room, half-written ones of a gateway that was killed too; other files stay."""
    folder = tmp_path / "captures"
    consider(made(folder), [0.5])
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (folder / "killed.part").write_bytes(b"x" * 5000)
    (folder / "notes.txt").write_text("keep me")
    for age_s, old in ((200, folder / "killed.part"), (300, folder / "notes.txt"), (100, file)):
        os.utime(old, (1e9 - age_s, 1e9 - age_s))
    limit = 3 * file.stat().st_size
    consider(made(folder, max_bytes=limit), [0.1, 0.2, 0.3, 0.4])
    assert not (folder / "killed.part").exists()
    assert (folder / "notes.txt").exists()
    assert kept_bytes(folder) <= limit
    assert [round(read_capture(one).facts.figures["rel_l2"] or 0, 1) for one in sorted_by_age(folder)][
        -1
    ] == 0.4


def sorted_by_age(folder: Path) -> list[Path]:
    """Captures, the oldest first."""
    return sorted(folder.glob("*.safetensors"), key=lambda file: (file.stat().st_mtime_ns, file.name))


def kept_bytes(folder: Path) -> int:
    """What captures take."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_named_tensors_are_left_out(tmp_path: Path) -> None:
    """The others stay; the capture says which are missing."""
    tensors = {"x": np.ones((1, 1), np.float32), "name": np.zeros((1, 3), np.int64)}
    consider(made(tmp_path, redact=["name"]), [0.5], **tensors)
    (file,) = tmp_path.iterdir()
    capture = read_capture(file)
    assert set(capture.inputs) == {"x"}
    assert capture.facts.redacted == ("name",)


def test_a_name_that_is_no_model_tensor_leaves_all_out(tmp_path: Path) -> None:
    """Preprocessing made model tensors of it, and which ones cannot be told."""
    tensors = {"ids": np.ones((1, 4), np.int64), "mask": np.ones((1, 4), np.int64)}
    consider(made(tmp_path, redact=["text", "ids"]), [0.5], **tensors)
    (file,) = tmp_path.iterdir()
    capture = read_capture(file)
    assert capture.inputs == {}
    assert set(capture.facts.redacted) == {"ids", "mask"}


def test_text_is_not_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once."""
    folder = made(tmp_path)
    for _ in range(3):
        consider(folder, [0.5], t=np.array([b"text"], object))
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("rows with text cannot be captured") == 1


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Comparison goes on."""
    (tmp_path / "file").write_text("in the way")
    folder = made(tmp_path / "file" / "captures")
    for _ in range(3):
        consider(folder, [0.5, 0.6])
    assert caplog.text.count("a capture cannot be written") == 1


def test_two_gateways_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One makes room while the other looks: a file that is gone is no fault."""
    consider(made(tmp_path), [0.5])
    real = Path.stat

    def vanishing(self: Path, **options: Any) -> os.stat_result:
        if self.name.endswith("000000.safetensors") and "-1234-" not in self.name:
            self.unlink(missing_ok=True)
        return real(self, **options)

    monkeypatch.setattr(os, "getpid", lambda: 1234)
    monkeypatch.setattr(Path, "stat", vanishing)
    consider(made(tmp_path, max_bytes=1024), [0.7])
    monkeypatch.undo()
    assert all("-1234-" in file.name for file in tmp_path.iterdir())
    assert not caplog.records
