"""What the cluster's processes print, on this process's own stdout and stderr.

Ray forwards it with a prefix before each line and drops lines that look alike. Halftone's own lines
are whole as they are; in JSON, everything else becomes an object of its own, so that a collector
never meets a line that is none.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from serving.observe.logs import LogFormat

_RAY_HANDLER = "ray_print_logs"
#: How Halftone's own lines begin.
_OWN_TEXT = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ (halftone|serving)\b")
_OWN_JSON = '{"time": "'


def forward_output(form: LogFormat) -> None:
    """From now on print the processes' lines; call it once this process is connected to its cluster."""
    # Private to Ray, whose version is pinned; there is no public way to be without the prefix.
    from ray._private.ray_logging import global_worker_stdstream_dispatcher  # noqa: PLC0415  Slow to import.

    global_worker_stdstream_dispatcher.remove_handler(_RAY_HANDLER)
    global_worker_stdstream_dispatcher.add_handler("halftone", lambda data: _print(data, form))


def _print(data: Mapping[str, Any], form: LogFormat) -> None:
    if data.get("pid") == "autoscaler":
        return  # It says every few seconds that this one machine is as large as it was.
    sink = sys.stderr if data["is_err"] else sys.stdout
    process = f"{data.get('actor_name') or data.get('task_name') or 'ray'} pid={data.get('pid')}"
    for line in data["lines"]:
        print(printed(line, process, form), file=sink, flush=True)


def printed(line: str, process: str, form: LogFormat) -> str:
    """One line as it is shown.

    Args:
        line: of a process's output, without its end.
        process: what wrote it.
        form: of the lines.
    """
    if form == "json":
        return line if line.startswith(_OWN_JSON) else _wrapped(line, process)
    return line if _OWN_TEXT.match(line) else f"({process}) {line}"


def _wrapped(line: str, process: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": now, "level": "INFO", "logger": "output", "message": line, "process": process})
