"""Traffic of mixed sensitivity against a running server: `make loadtest SCENARIO=mixed|ramp|spike|soak`.

    locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8000 --scenario spike

Callers declare classes and tiers of the model, `critical` and `fp32` among them, and wait a little between
requests. Every reply is checked: the tier that answered is the declared one or a more precise one, and who
declared `critical` or `fp32` was answered by FP32 arithmetic. An answer that is not ends the run with exit
status 1, and so does any other failure but 503: a full queue may refuse, and is counted as `refused`.

`mixed`: --peak-users at once, 1 minute. `ramp`: from none to --peak-users, 3 minutes. `spike`: a tenth of
them, all for a fifth of the time, a tenth again; 2 minutes. `soak`: half of them for an hour. --minutes
overrides.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from locust import FastHttpUser, LoadTestShape, between, events, task
from precision_contract import SENSITIVE, broken_contract  # Locust finds what lies beside this file.

#: How often each kind of declaration is drawn: sensitive, any other, none.
SHARES = (3, 6, 1)
ROWS, ROW_WEIGHTS = (1, 4, 16), (8, 3, 1)

#: Elapsed share of the scenario -> share of the peak users; and minutes by default.
SCENARIOS: Mapping[str, tuple[Callable[[float], float], float]] = {
    "mixed": (lambda _: 1.0, 1),
    "ramp": (lambda elapsed: elapsed, 3),
    "spike": (lambda elapsed: 1.0 if 0.4 <= elapsed < 0.6 else 0.1, 2),  # noqa: PLR2004
    "soak": (lambda _: 0.5, 60),
}


@events.init_command_line_parser.add_listener
def add_options(parser: argparse.ArgumentParser) -> None:
    """Which traffic, beside Locust's own options."""
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="mixed")
    parser.add_argument("--model", default="text", help="its name on the server")
    parser.add_argument("--peak-users", type=int, default=20, help="callers at the scenario's peak")
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of the scenario's own length")


class Scenario(LoadTestShape):
    """The number of callers over time."""

    def tick(self) -> tuple[int, float] | None:
        """Callers now, and how many may be added per second; None: the end."""
        options = self.runner.environment.parsed_options
        share_of, minutes = SCENARIOS[options.scenario]
        elapsed = self.get_run_time() / (60 * (options.minutes or minutes))
        if elapsed >= 1:
            return None
        return max(1, round(options.peak_users * share_of(elapsed))), float(options.peak_users)


class Caller(FastHttpUser):
    """Declares, sends, checks."""

    wait_time = between(0.02, 0.2)
    #: What the server says of the model, read by the first caller.
    model: ClassVar[dict[str, Any]] = {}
    example: ClassVar[dict[str, Any]] = {}
    #: Answers less precise than declared.
    violations: ClassVar[list[str]] = []

    def on_start(self) -> None:
        """Learn the model's tiers and classes."""
        if not Caller.example:
            route = f"/v2/models/{self.environment.parsed_options.model}"
            Caller.model.update(self.client.get(route, name="metadata").json())
            Caller.example.update(self.client.get(f"{route}/example", name="example").json())

    @task
    def infer(self) -> None:
        """One request, and its check."""
        declared = self.declare()
        headers = {} if declared is None else {"X-Precision": declared}
        rows = random.choices(ROWS, ROW_WEIGHTS)[0]  # noqa: S311
        name = f"{declared or 'no declaration'}, {rows} rows"
        route = f"/v2/models/{self.environment.parsed_options.model}/infer"
        body = {"inputs": [repeated(tensor, rows) for tensor in Caller.example["inputs"]]}
        with self.client.post(route, json=body, headers=headers, name=name, catch_response=True) as reply:
            if reply.status_code == 503:  # noqa: PLR2004
                reply.failure("refused")
            elif reply.status_code != 200:  # noqa: PLR2004
                reply.failure(f"status {reply.status_code}")
            elif wrong := broken_contract(Caller.model, declared, reply.headers):
                Caller.violations.append(wrong)
                reply.failure(wrong)
            else:
                reply.success()

    def declare(self) -> str | None:
        """A declaration that the model knows."""
        known = [*Caller.model["classes"], *available(Caller.model)]
        sensitive = [name for name in known if name in SENSITIVE]
        others = [name for name in known if name not in SENSITIVE]
        pools = random.choices((sensitive, others, [None]), SHARES)[0]  # noqa: S311
        return random.choice(pools or [None])  # noqa: S311


def available(model: Mapping[str, Any]) -> list[str]:
    """Tiers that the device can honour."""
    return [name for name, tier in model["tiers"].items() if "unavailable" not in tier]


def repeated(tensor: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """An example tensor, its rows repeated up to that many."""
    example_rows, *rest = tensor["shape"]
    row_size = len(tensor["data"]) // example_rows
    data = (list(tensor["data"]) * -(-rows // example_rows))[: rows * row_size]
    return {**tensor, "shape": [rows, *rest], "data": data}


@events.quitting.add_listener
def set_exit_status(environment: Any, **_: Any) -> None:
    """1 where a reply broke the contract, or anything but a refusal failed."""
    for wrong in sorted(set(Caller.violations)):
        print(f"precision contract broken: {wrong}")
    others = [error for error in environment.runner.errors.values() if "refused" not in str(error.error)]
    environment.process_exit_code = 1 if Caller.violations or others else 0
