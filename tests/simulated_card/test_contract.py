"""What the real torch_npu makes of our calls, on a simulated card (stub CANN).

Each kind of card and each mode of torch_npu's task queue has one process, which runs every check of
`contract_child.py`; each fault has a process of its own, since it leaves torch_npu unusable.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import contract_child
import pytest
from card import HERE, IEEE, SATURATING, SimulatedCard

TIMEOUT_S = 120
#: For the checks that run a batch too large for it.
MEMORY_MB = 512

Results = dict[str, str | None]

#: A 310P and an A3 differ from a 910A and a 910B in their numbers alone; one mode will do.
each_card_and_mode = pytest.mark.parametrize(
    ("soc", "task_queue"),
    [
        *((soc, mode) for soc in (SATURATING, IEEE) for mode in (True, False)),
        ("Ascend310P3", True),
        ("Ascend910_9391", True),
    ],
)
each_mode = pytest.mark.parametrize("task_queue", [True, False], ids=["queued", "blocking"])


@pytest.fixture(scope="session")
def contract(card: SimulatedCard, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """The results of a process, run when first asked for."""
    done: dict[tuple[str, str, bool], Results] = {}

    def run(checks: str, soc: str, task_queue: bool) -> Results:
        key = (checks, soc, task_queue)
        if key not in done:
            done[key] = _run(card, checks, soc, task_queue, tmp_path_factory.mktemp("contract"))
        return done[key]

    return run


def _run(card: SimulatedCard, checks: str, soc: str, task_queue: bool, folder: Path) -> Results:
    results = folder / "results.json"
    child = subprocess.run(
        [sys.executable, str(HERE / "contract_child.py"), str(results), checks],
        env=card.environment(soc, memory_mb=MEMORY_MB, task_queue=task_queue),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    found: Results = json.loads(results.read_text("utf-8")) if results.exists() else {}
    if child.returncode != 0:
        found["end"] = f"exit status {child.returncode}: {child.stderr[-8000:]}"
    return found


@each_card_and_mode
@pytest.mark.parametrize("name", list(contract_child.CHECKS))
def test_contract(contract: Callable[..., Results], name: str, soc: str, *, task_queue: bool) -> None:
    """One check of `contract_child.py`, whose docstring says what holds."""
    found = contract("contract", soc, task_queue)
    assert name in found, f"not reached; {found.get('end')}"
    assert found[name] is None, found[name]


@each_mode
@pytest.mark.parametrize("name", list(contract_child.FAULTS))
def test_fault(contract: Callable[..., Results], name: str, *, task_queue: bool) -> None:
    """One fault of `contract_child.py`: no answer leaves."""
    found = contract(name, IEEE, task_queue)
    ended = found.pop("end", None)
    # torch_npu's own queue thread may end the process on a failed copy; no answer has left then either.
    assert ended is None or "simulated fault in memcpy" in ended, ended
    assert found.get(name) is None, found[name]
