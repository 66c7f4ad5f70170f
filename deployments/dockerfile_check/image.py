"""What an image must do, checked on the root folder that stands for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from root import Stage, enter, launch
from saying import expect, say

CPU_CONFIG = "/etc/halftone/local.yaml"
READY_TIMEOUT_S, STOP_TIMEOUT_S = 180.0, 60.0
COMPILERS = ("gcc", "g++", "cc", "c++", "cpp", "make", "cmake")
REQUEST = """
import json, urllib.request as u
example = u.urlopen("http://127.0.0.1:8000/v2/models/text/example", timeout=20).read()
for tier in ("fp32", "fp16"):
    headers = {"Content-Type": "application/json", "X-Precision": tier}
    reply = u.urlopen(u.Request("http://127.0.0.1:8000/v2/models/text/infer", example, headers), timeout=20)
    print(tier, reply.status, reply.headers["X-Precision-Effective"], json.load(reply)["outputs"][0]["shape"])
"""
#: Prints the processes that have ended and that nobody has waited for.
ZOMBIES = """
from pathlib import Path
states = [path.read_text().rpartition(")")[2].split()[0] for path in Path("/proc").glob("[0-9]*/stat")]
raise SystemExit(f"{states.count('Z')} of {len(states)} processes are zombies" if "Z" in states else 0)
"""


def check_image(image: Stage) -> None:
    """Its commands, then its server. Ends the process at the first thing that does not hold."""
    for arguments in (
        ["halftone", "check", "/etc/halftone/ascend.yaml"],
        ["halftone", "check", CPU_CONFIG],
        ["halftone", "doctor", "--card", "910b"],
    ):
        say("CHECK " + " ".join(arguments))
        expect(enter(image, arguments).returncode == 0, f"{arguments} succeeds")
    script = f"id -u; for c in {' '.join(COMPILERS)}; do command -v $c || true; done"
    found = enter(image, ["sh", "-c", script], stdout=subprocess.PIPE, text=True).stdout.split()
    expect(found == ["1000"], f"the user is 1000 and there is no compiler: {' '.join(found)}")
    log = image.root / "tmp/serve.log"
    with log.open("wb") as output:
        arguments = [*image.entrypoint, image.command[0], CPU_CONFIG]
        server = launch(image, arguments, stdout=output, stderr=output)
    try:
        check_server(image, server)
    finally:
        server.kill()
        server.wait()
        print(log.read_text(errors="replace"))


def check_server(image: Stage, server: subprocess.Popen[Any]) -> None:
    """The health check, a request and SIGTERM."""
    pid = int(wait_for(lambda: Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().strip()))
    status = Path(f"/proc/{pid}/status")

    def run(arguments: Sequence[str], **options: Any) -> int:
        return enter(image, arguments, beside=pid, **options).returncode

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    say("CHECK HEALTHCHECK " + " ".join(image.health))
    expect(run(image.health, **quiet) != 0, "the health check fails before the server is up")
    wait_for(lambda: run(image.health, **quiet) == 0)
    expect(run(image.health) == 0, "and passes once it is")
    ready = [*image.health[:2], image.health[2].replace("/live", "/ready")]
    wait_for(lambda: run(ready, **quiet) == 0)
    expect(run([image.health[0], "-c", REQUEST]) == 0, "requests are answered at fp32 and fp16")
    expect(re.search(r"^NSpid:.*\t1$", status.read_text(), re.MULTILINE) is not None, "the server is PID 1")
    expect(
        re.search(r"^Uid:\t1000\t1000", status.read_text(), re.MULTILINE) is not None, "it runs as user 1000"
    )
    expect(run([image.health[0], "-c", ZOMBIES]) == 0, "no ended process is left uncollected")
    started_s = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    code = server.wait(STOP_TIMEOUT_S)
    expect(code == 0, f"SIGTERM ends it after {time.monotonic() - started_s:.1f} s with status {code}")


def wait_for(condition: Callable[[], Any]) -> Any:
    """What the condition returns once that is true."""
    give_up_s = time.monotonic() + READY_TIMEOUT_S
    while not (found := condition()):
        if time.monotonic() > give_up_s:
            raise SystemExit(f"FAILED: not within {READY_TIMEOUT_S:g} s")
        time.sleep(0.5)
    return found
