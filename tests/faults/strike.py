"""Strike a process of a running server under load, and report what was lost and how long it took to heal.

Usage: python tests/faults/strike.py faulty:fp32 --model faulty --signal KILL

The target is part of a process's title, as `ps -e -o pid,args | grep halftone` shows it: MODEL:TIER for a
replica, `gateway`, `hub`; or `controller`, Serve's own. STOP freezes the process instead of ending it. With
one replica of two killed, every reply should be 200; of the only one, some are 503 until it has healed.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

CONTROLLER = "ServeController"
CLIENTS = 4
GIVE_UP_AFTER_S = 300.0


def main() -> int:
    """Strike, watch, report. Returns 0 when the server healed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="as in faulty:fp32, gateway, hub, controller")
    parser.add_argument("--model", required=True, help="whose example is asked for all the while")
    parser.add_argument("--signal", default="KILL", choices=("KILL", "STOP", "TERM"))
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    title = CONTROLLER if options.target == "controller" else f"halftone:{options.target}"
    victims = titled(title)
    if not victims:
        print(f"no process of a server has {options.target!r} in its title", file=sys.stderr)
        return 2
    status, body = ask(options.port, "GET", f"/v2/models/{options.model}/example")
    if status != 200:
        print(body.decode(), file=sys.stderr)
        return 2
    replies: Counter[int] = Counter()
    over = threading.Event()
    path = f"/v2/models/{options.model}/infer"
    threads = [
        threading.Thread(target=keep_asking, args=(options.port, path, body, replies, over))
        for _ in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    os.kill(victims[0], signal.Signals[f"SIG{options.signal}"])
    struck_s = time.monotonic()
    print(f"SIG{options.signal} to {victims[0]}, one of {len(victims)}")
    healed = wait_until_healed(options.port, title, victims)
    print(f"{'healed' if healed else 'NOT healed'} after {time.monotonic() - struck_s:.1f} s")
    over.set()
    for thread in threads:
        thread.join()
    print("replies by status (0: none):", dict(sorted(replies.items())))
    return 0 if healed else 1


def wait_until_healed(port: int, title: str, before: list[int]) -> bool:
    """Whether as many processes run again, without the one that was struck, and the server is ready."""
    give_up_s = time.monotonic() + GIVE_UP_AFTER_S
    while time.monotonic() < give_up_s:
        now = titled(title)
        if (
            before[0] not in now
            and len(now) >= len(before)
            and ask(port, "GET", "/v2/health/ready")[0] == 200
        ):
            return True
        time.sleep(0.1)
    return False


def keep_asking(port: int, path: str, body: bytes, replies: Counter[int], over: threading.Event) -> None:
    """One request after the other, each on a connection of its own."""
    while not over.is_set():
        status, _ = ask(port, "POST", path, body)
        replies[status] += 1
        if not status:
            time.sleep(0.05)


def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one request; status 0 when there was no reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body or None, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def titled(title: str) -> list[int]:
    """This user's processes with `title` in their title."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_own = command.stat().st_uid == os.getuid()
            text = command.read_bytes().decode(errors="replace")
        except OSError:
            continue  # It has just ended.
        if is_own and text.startswith("ray::") and title in text:
            found.append(int(command.parent.name))
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main())
