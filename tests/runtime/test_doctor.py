"""`halftone doctor`: what each kind of tier gets on this machine, by arithmetic."""

import json
from typing import get_args

import pytest
import torch

from serving.cli import main
from serving.config import TierKind
from serving.runtime.doctor import as_text, examine, probe


def test_every_kind_is_measured_or_refused_with_a_reason() -> None:
    """On the CPU as it is and on each rehearsed card; never a kind without a verdict."""
    report = examine(["910a", "910b"])
    assert [(d["device"], d["card"]) for d in report["devices"]][:3] == [
        ("cpu", None),
        ("cpu", "910a"),
        ("cpu", "910b"),
    ]
    for device in report["devices"]:
        assert set(device["tiers"]) == set(get_args(TierKind))
        assert all(bool(tier["effective"]) != bool(tier["reason"]) for tier in device["tiers"].values())
        assert device["switches"]


def test_the_cards_differ_by_their_rules() -> None:
    """A 910A has no FP32 products and saturates; a 910B has both."""
    plain, old, new = (device["tiers"] for device in examine(["910a", "910b"])["devices"][:3])
    assert plain["fp32"]["effective"] == new["fp32"]["effective"] == "fp32-ieee"
    assert "fp32-storage-fp16-cube" in old["fp32"]["reason"]
    assert old["fp16"]["effective"] == "fp16-saturating-emulated"
    assert new["hf32"]["effective"] == "hf32-emulated"


def test_operators_are_measured_one_by_one() -> None:
    """Also those of a refused tier; the table shows them where they differ."""
    report = examine(["910a"])
    plain, old = (device["tiers"] for device in report["devices"][:2])
    names = {"matrix products", "convolutions", "attention"}
    assert plain["fp32"]["operators"] == dict.fromkeys(names, "fp32-ieee")
    assert old["fp32"]["operators"] == dict.fromkeys(names, "fp32-storage-fp16-cube")
    assert old["bf16"]["operators"] == {}
    lines = as_text(report).splitlines()
    assert "  fp32       fp32-ieee" in lines
    # Attention has no weights to be rounded.
    assert any("layercast" in line and line.endswith("attention fp32-ieee)") for line in lines)


def test_a_device_that_is_not_there_says_so() -> None:
    """Instead of a stack trace."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    finding = probe("cuda", "ieee", "fp32")
    assert finding.effective is None
    assert "torch sees no CUDA device" in finding.reason


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The same findings, for a person and for a program."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.rstrip("\n") == as_text(report)
    assert "fp32-ieee" in text
    assert "float32_matmul_precision=highest" in text
