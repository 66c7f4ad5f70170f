"""`halftone doctor`: what this machine computes with, found out by computing.

For each device and kind of tier: the effective precision that the probe measures, or why the
kind is refused, and every switch that can lower precision, read back. Switches are
process-wide and differ between kinds on a GPU or NPU, so each is probed in a process of its
own.
"""

from __future__ import annotations

import multiprocessing
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

from serving import __version__
from serving.config import TierKind
from serving.errors import HalftoneError, PrecisionUnavailable

PACKAGES = ("torch", "torch_npu", "ray", "numpy", "httptools")
PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of tier on one device."""

    device: str
    card: str
    kind: str
    #: As it would be served; None where it is refused.
    effective: str | None
    #: Why it is refused, or why there is no finding.
    reason: str
    name: str
    switches: Mapping[str, str]
    #: What was measured of each operator, by name; empty where nothing could be.
    operators: Mapping[str, str] = field(default_factory=dict)


def examine(cards: Sequence[str] = ()) -> dict[str, Any]:
    """Versions, devices and findings, as plain data.

    Args:
        cards: cards to rehearse on the CPU as well.
    """
    targets = [("cpu", "ieee"), *(("cpu", card) for card in cards)]
    targets += [(device, "ieee") for device in _accelerators()]
    return {
        "halftone": __version__,
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
        "devices": [_device(device, card) for device, card in targets],
    }


def _device(device: str, card: str) -> dict[str, Any]:
    kinds: tuple[TierKind, ...] = get_args(TierKind)
    findings = [_in_own_process(device, card, kind) for kind in kinds]
    first = findings[0]
    return {
        "device": device,
        "card": None if card == "ieee" else card,
        "name": first.name,
        "switches": dict(first.switches),
        "tiers": {
            f.kind: {"effective": f.effective, "reason": f.reason, "operators": dict(f.operators)}
            for f in findings
        },
    }


def _in_own_process(device: str, card: str, kind: TierKind) -> Finding:
    if device == "cpu":  # Its switches are the same for every kind.
        return probe(device, card, kind)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        call = pool.apply_async(probe, (device, card, kind))
        try:
            return call.get(PROBE_TIMEOUT_S)
        except multiprocessing.TimeoutError:
            reason = f"no answer within {PROBE_TIMEOUT_S:g} s"
            return Finding(device, card, kind, None, reason, device, {})


def probe(device: str, card: str, kind: TierKind) -> Finding:
    """Open the device for one kind of tier and measure what it computes with."""
    from serving.numerics.devices import open_device  # noqa: PLC0415  Imports torch.
    from serving.numerics.precision import PrecisionSpec  # noqa: PLC0415
    from serving.numerics.probe import admit, attest  # noqa: PLC0415

    name, switches, operators = device, dict[str, str](), dict[str, str]()
    try:
        opened = open_device(device, 1, card, tier=kind)
        name, switches = opened.title, dict(opened.switches)
        spec = PrecisionSpec(kind=kind)
        found = attest(spec, opened)
        operators = {
            "matrix products": found.matmul,
            "convolutions": found.conv,
            "attention": found.attention,
        }
        effective = admit(spec, opened, found)
    except PrecisionUnavailable as error:
        return Finding(device, card, kind, None, str(error), name, switches, operators)
    except HalftoneError as error:
        return Finding(device, card, kind, None, f"cannot be opened: {error}", name, switches)
    return Finding(device, card, kind, effective, "", name, switches, operators)


def _accelerators() -> list[str]:
    """The kinds of accelerators that this machine has, found without initialising them."""
    import torch  # noqa: PLC0415

    from serving.numerics.devices.npu import npu_present  # noqa: PLC0415

    found = ["npu"] if npu_present() else []
    return [*found, "cuda"] if torch.cuda.is_available() else found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def as_text(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    packages = ", ".join(f"{name} {found or 'not installed'}" for name, found in report["packages"].items())
    lines = [f"halftone {report['halftone']}, python {report['python']}", packages]
    for device in report["devices"]:
        lines += ["", f"{device['device']}: {device['name']}"]
        width = max(len(kind) for kind in device["tiers"])
        for kind, tier in device["tiers"].items():
            verdict = tier["effective"] or f"refused: {tier['reason']}"
            operators = tier["operators"]
            if tier["effective"] and len(set(operators.values())) > 1:
                verdict += f" ({', '.join(f'{name} {found}' for name, found in operators.items())})"
            lines.append(f"  {kind.ljust(width)}  {verdict}")
        switches = ", ".join(f"{name}={value}" for name, value in device["switches"].items())
        lines.append(f"  switches: {switches}")
    return "\n".join(lines)
