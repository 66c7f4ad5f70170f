"""The console page: a few fixed files, read from the package once, that need nothing beyond this server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

_CONTENT_TYPES = {
    "console.html": "text/html; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "console.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "prometheus.js": "text/javascript; charset=utf-8",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: The page loads, runs and asks nothing but what this server has; nobody may frame it.
SECURITY_HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """One file of the page."""

    content_type: str
    body: bytes


def _read(name: str, content_type: str) -> ConsoleFile:
    return ConsoleFile(content_type, files(__package__).joinpath(name).read_bytes())


#: By name; whatever else a path says is no file.
CONSOLE_FILES: Mapping[str, ConsoleFile] = MappingProxyType(
    {name: _read(name, content_type) for name, content_type in _CONTENT_TYPES.items()}
)
