"""Ratios, medians, the table and the picture of `make bench`."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from loadtests.bench import report
from loadtests.bench.bar_chart import Bar, Panel, bar_charts


def figures(at_32: float, at_128: float, p50_alone: float, open_p99: float) -> dict[str, Any]:
    """One server's."""
    return {
        "requests_per_s": {1: 10.0, 32: at_32, 128: at_128},
        "p50_ms": {1: p50_alone, 32: 1.0, 128: 1.0},
        "p99_ms": {1: 1.0, 32: 300.0, 128: 1.0},
        "open_loop": {
            "latency_ms": {"p99": open_p99}, "offered_per_s": 7.0, "kept_up": True, "failures": {},
        },
    }  # fmt: skip


RESULTS: report.Results = {
    "echo": {
        "halftone": figures(800, 900, 0.5, 4),
        "mosec": {**figures(400, 300, 2.0, 8), "halftone_at_its_rate": {"latency_ms": {"p99": 2.0}}},
    },
    "model": {"halftone": figures(90, 95, 9, 100), "litserve": figures(45, 50, 9, 400)},
}
TORCH = {"1": 50.0, "32": 100.0}


def test_ratios_are_ours_over_theirs() -> None:
    """Keys without suffix are at 32 connections."""
    found = report.ratios(RESULTS, TORCH)
    assert found == {
        "echo/mosec": 2.0,
        "echo/mosec@128": 3.0,
        "open_p99_echo/mosec": 0.5,
        "open_p99_same_rate_echo/mosec": 0.25,
        "p50_alone/mosec": 0.25,
        "model/litserve": 2.0,
        "model/litserve@128": 1.9,
        "open_p99/litserve": 0.25,
        "model/torch_loop": 0.9,
        "model/torch_loop@128": 0.95,
        # A batch of 32 takes 320 ms in the loop.
        "model_p99/bound": pytest.approx(300 / (2 * 322), abs=0.001),
    }


def test_without_our_own_figures_there_are_no_ratios() -> None:
    """A Halftone that did not start beats nobody."""
    assert report.ratios({"echo": {"mosec": figures(1, 1, 1, 1)}}, {}) == {}


def test_medians_are_taken_figure_by_figure() -> None:
    """Flags hold if they held in every round; texts are the last round's."""
    rounds = [{"a": {1: 3.0}, "ok": True}, {"a": {1: 1.0}, "ok": False}, {"a": {1: 2.0}, "ok": True}]
    assert report.medians(rounds) == {"a": {1: 2.0}, "ok": False}


def test_a_server_that_failed_is_in_the_table_with_its_reason() -> None:
    """Not dropped in silence."""
    found = {
        "results": RESULTS,
        "ratios": report.ratios(RESULTS, TORCH),
        "torch_loop_rows_per_s": TORCH,
        "failures": {"echo/bentoml": "3 of 3 rounds failed, the last one: no such module\nmore"},
    }
    text = report.table(found)
    assert "echo/bentoml: 3 of 3 rounds failed, the last one: no such module\n" in text + "\n"
    assert "| Mosec | 2.00 ms | 400/s | 300/s | 2.00 · 3.00 | 7/s, 8.0 ms | 2.0 ms |" in text
    assert "| LitServe | 9.00 ms | 45/s | 50/s | 2.00 · 1.90 | 7/s, 400.0 ms |  |" in text
    assert "| bare torch loop, batches of 32 | | 100/s | 100/s | 0.90 · 0.95 | | |" in text


def test_the_picture_is_well_formed_and_to_scale() -> None:
    """The longest bar of each panel fills it; text is escaped."""
    panels = [Panel("a < b", [Bar("x & y", 50, is_ours=True), Bar("z", 100, is_ours=False)])]
    root = ET.fromstring(bar_charts("t", panels))  # noqa: S314  Our own text.
    widths = [float(one.attrib["width"]) for one in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[1] == pytest.approx(2 * widths[0])
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts
    assert "x & y" in texts
