"""Capture files: what is written is read back, and nothing else is taken for one."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from serving.divergence.capture import Capture, CaptureFacts, can_be_captured, read_capture
from serving.errors import ConfigError

FACTS = CaptureFacts(
    model="m",
    tier="fp16",
    reference="fp32",
    request_id="r-1",
    captured_at="2030-01-01T00:00:00.000+00:00",
    figures={"rel_l2": 0.25, "cosine_distance": None},
    verdict="fail",
    versions={"torch": "2.13.0"},
    tiers={"fp16": {"effective": "fp16-emulated", "kept_fp32": ["head"]}},
    redacted=("secret",),
)


def capture() -> Capture:
    """One with every kind of dtype."""
    inputs = {
        "x": np.array([[1.5, np.nan]], np.float32),
        "half": np.array([[1.5]], np.float16),
        "ids": np.array([[1, -2]], np.int64),
        "mask": np.array([[True, False]]),
        "nothing": np.zeros((1, 0), np.float32),
    }
    return Capture(FACTS, inputs, {"y": np.ones((1, 2), np.float32)}, {"y": np.zeros((1, 2), np.float32)})


def test_a_capture_is_read_back_to_the_bit(tmp_path: Path) -> None:
    """Tensors and facts; also of views that are not contiguous."""
    file = tmp_path / "one.safetensors"
    written = capture()
    written.inputs["x"] = np.array([[1.5, 0, np.nan, 0]], np.float32)[:, ::2]
    file.write_bytes(written.encode())
    found = read_capture(file)
    assert found.facts == FACTS
    for name in ("inputs", "tier_outputs", "reference_outputs"):
        one, other = getattr(found, name), getattr(written, name)
        assert set(one) == set(other)
        for key in one:
            assert one[key].dtype == other[key].dtype
            assert one[key].shape == other[key].shape
            assert one[key].tobytes() == other[key].tobytes()


def test_text_has_no_place_in_the_format() -> None:
    """It is not captured at all, rather than in part."""
    assert can_be_captured({"x": np.ones(1)}, {"i": np.ones(1, int)})
    assert not can_be_captured({"x": np.ones(1)}, {"t": np.array([b"text"], object)})


def facts_file(facts: object) -> bytes:
    """A capture of these facts."""
    return save({"input/x": np.ones((1, 1), np.float32)}, {"halftone": json.dumps(facts)})


GOOD_FACTS = json.loads(json.dumps({name: getattr(FACTS, name) for name in FACTS.__slots__}))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a capture",
        b"\xff" * 64,
        b"\x80\x04K\x01.",  # A pickle.
        save({"input/x": np.ones((1, 1), np.float32)}),
        save({"input/x": np.ones((1, 1), np.float32)}, {"halftone": "{"}),
        facts_file([]),
        facts_file({}),
        facts_file({**GOOD_FACTS, "tiers": []}),
        facts_file({**GOOD_FACTS, "tiers": {"fp16": 7}}),
        facts_file({**GOOD_FACTS, "figures": {"rel_l2": "large"}}),
        facts_file({**GOOD_FACTS, "redacted": "x"}),
    ],
)
def test_what_is_no_capture_is_refused(tmp_path: Path, content: bytes) -> None:
    """By its name, and without a trace of Python."""
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.safetensors is no divergence capture"):
        read_capture(file)


def test_good_facts_are_accepted(tmp_path: Path) -> None:
    """The cases above fail for what they say."""
    file = tmp_path / "good.safetensors"
    file.write_bytes(facts_file(GOOD_FACTS))
    assert read_capture(file).facts == FACTS


@pytest.mark.parametrize("name", ["absent.safetensors", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """Says so."""
    with pytest.raises(ConfigError, match=r"cannot read|no divergence capture"):
        read_capture(tmp_path / name)
