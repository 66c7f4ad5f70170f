"""Send the faulty model a row that makes it raise, exit, hang or kill its process, and show the reply.

Usage: python tests/faults/send_row.py deadly

The server: PYTHONPATH=tests/http/models halftone serve tests/faults/faulty.yaml. `hangs` (its
device thread) and `hangs_hard` (its whole process) hang one replica, once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http" / "models"))

from mypackage import faulty

ROWS = {
    "fine": 1.0,
    "raises": faulty.RAISES,
    "exits": faulty.EXITS,
    "hangs": faulty.HANGS,
    "hangs_hard": faulty.HANGS_HARD,
    "deadly": faulty.DEADLY,
}
TIMEOUT_S = 120.0


def main() -> None:
    """Send the row between two harmless ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if options.row.startswith("hangs"):
        faulty.HANG_ONCE.touch()
    data = [1.0, 1.0, ROWS[options.row], 1.0, 2.0, 1.0]
    tensor = {"name": "x", "shape": [3, 2], "datatype": "FP32", "data": data}
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=TIMEOUT_S)
    connection.request("POST", "/v2/models/faulty/infer", json.dumps({"inputs": [tensor]}))
    response = connection.getresponse()
    print(f"{response.status} after {time.monotonic() - began_s:.1f} s: {response.read().decode()}")


if __name__ == "__main__":
    main()
