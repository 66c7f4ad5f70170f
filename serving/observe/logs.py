"""Log lines of Halftone's processes: text for people, or JSON for machines, one line each."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

#: The loggers of this package, by their two conventions.
LOGGERS = ("halftone", "serving")
#: How a record carries fields of its own: `logger.info("…", extra={FIELDS: {...}})`.
FIELDS = "halftone_fields"


def configure_logging(form: LogFormat, stream: TextIO | None = None) -> None:
    """Write this process's lines to `stream`, stderr by default. Called again, it replaces itself."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


class JsonFormatter(logging.Formatter):
    """One object a line, ASCII: whatever a message quotes, it stays one line."""

    def format(self, record: logging.LogRecord) -> str:
        """`time`, `level`, `logger`, `message`, the record's own fields, and `exception`."""
        document = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER MESSAGE name=value …`; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """What is not printable in a message or a value is escaped, line breaks too."""
        fields = "".join(f" {name}={_value(value)}" for name, value in getattr(record, FIELDS, {}).items())
        message = _printable(record.getMessage())
        line = f"{_time(record)} {record.levelname} {record.name} {message}{fields}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _value(value: object) -> str:
    """As it is where it is one plain word, quoted otherwise."""
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(" =\"'\\") and text
    return text if plain else json.dumps(text)


def _printable(text: str) -> str:
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
