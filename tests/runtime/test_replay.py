"""`halftone replay`: a captured row computed again, on the tiers that it was captured on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from serving.cli import main
from serving.config import Config, load_config
from serving.divergence.capture import Capture, CaptureFacts
from serving.errors import ConfigError
from serving.runtime.replay import replay

CONFIG = """
models:
  - name: e
    source: serving.models.echo:Echo
    tiers: {fp32: {}, fp16: {}, mixed: {}}
"""
FACTS = CaptureFacts(
    model="e",
    tier="fp16",
    reference="fp32",
    request_id="r-1",
    captured_at="2030-01-01T00:00:00.000+00:00",
    figures={},
    verdict="pass",
    versions={},
    tiers={"fp16": {"effective": "fp16-emulated"}},
)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Of the echo model."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def config(config_file: Path) -> Config:
    """The same, read."""
    return load_config(config_file)


def captured(tmp_path: Path, facts: CaptureFacts = FACTS, factor: float = 1.0, name: str = "y") -> Path:
    """A row of the echo model, whose FP16 tier rounds: once more by `factor` than it does."""
    x = np.random.default_rng(0).standard_normal((1, 128)).astype(np.float32)
    rounded = x.astype(np.float16).astype(np.float32)
    capture = Capture(facts, {"x": x}, {name: x + (rounded - x) * np.float32(factor)}, {name: x})
    file = tmp_path / "captured.safetensors"
    file.write_bytes(capture.encode())
    return file


def test_the_divergence_shows_again(tmp_path: Path, config: Config) -> None:
    """On the same machine, the same bits."""
    said: list[str] = []
    assert replay(captured(tmp_path), config, said.append)
    text = "\n".join(said)
    assert "e/fp16 against fp32: r-1, 2030-01-01" in text
    assert "fp16: fp16-emulated, recorded as fp16-emulated" in text
    assert "fp16's answer is the same to the bit" in text
    assert "fp32's answer is the same to the bit" in text
    assert any(line.split()[0] == "rel_l2" for line in said[3:])


def test_a_divergence_that_does_not_show(tmp_path: Path, config: Config) -> None:
    """It was ten times as large where it was captured: another card, another driver."""
    said: list[str] = []
    assert not replay(captured(tmp_path, factor=10), config, said.append)
    assert any("fp16's answer is not the same to the bit" in line for line in said)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(FACTS, redacted=("x",)), "captured without x"),
        (replace(FACTS, model="nobody"), "no model nobody"),
        (replace(FACTS, tier="bf16"), "with the tiers bf16 and fp32"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    tmp_path: Path, config: Config, facts: CaptureFacts, words: str
) -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match=words):
        replay(captured(tmp_path, facts), config, lambda _: None)


def test_a_model_that_has_other_outputs_now(tmp_path: Path, config: Config) -> None:
    """Is named."""
    with pytest.raises(ConfigError, match="has other outputs than model e has now"):
        replay(captured(tmp_path, name="z"), config, lambda _: None)


def test_the_command(tmp_path: Path, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0 when it shows, 1 when not, 2 on bad input, each with its file's name."""
    assert main(["replay", str(captured(tmp_path)), str(config_file)]) == 0
    assert "the divergence shows again" in capsys.readouterr().out
    assert main(["replay", str(captured(tmp_path, factor=10)), str(config_file)]) == 1
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(save({"a": np.ones(1)}, {"halftone": json.dumps([])}))
    capsys.readouterr()
    assert main(["replay", str(bad), str(config_file)]) == 2
    assert capsys.readouterr().err.startswith(f"halftone: {bad} is no divergence capture")
    assert main(["replay", str(captured(tmp_path)), str(tmp_path / "absent.yaml")]) == 2
    assert str(tmp_path / "absent.yaml") in capsys.readouterr().err
    # Without a configuration: the one that `make serve` takes, which has no such model.
    assert main(["replay", str(captured(tmp_path))]) == 2
    assert "no model e" in capsys.readouterr().err
