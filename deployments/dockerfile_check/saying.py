"""What the check prints between the output of the commands that it runs."""

from __future__ import annotations


def expect(holds: bool, what: str) -> None:
    """Say that it holds, or end."""
    if not holds:
        raise SystemExit(f"FAILED: {what}")
    say(f"  ok: {what}")


def say(text: str) -> None:
    """At once, between the commands' own output."""
    print(f"[check] {text}", flush=True)
