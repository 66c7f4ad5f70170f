"""Log lines: one each, whatever they quote."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.observe.logs import FIELDS, LOGGERS, JsonFormatter, LogFormat, TextFormatter, configure_logging


@pytest.fixture
def quiet() -> Iterator[None]:
    """Loggers as they were."""
    known = {name: logging.getLogger(name) for name in LOGGERS}
    before = {name: (logger.handlers, logger.level, logger.propagate) for name, logger in known.items()}
    yield
    for name, (handlers, level, propagate) in before.items():
        known[name].handlers, known[name].propagate = handlers, propagate
        known[name].setLevel(level)


def record(message: str, **fields: object) -> logging.LogRecord:
    """A record with fields of its own."""
    found = logging.LogRecord("halftone.x", logging.INFO, __file__, 1, "%s", (message,), None)
    setattr(found, FIELDS, fields)
    return found


@given(st.text(), st.text())
def test_any_text_stays_on_its_line(message: str, value: str) -> None:
    """And in JSON comes back as it was, but for surrogates, which no text file holds."""
    text = TextFormatter().format(record(message, id=value))
    assert len(text.splitlines()) == 1
    line = JsonFormatter().format(record(message, id=value))
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["id"] == value
    assert json.loads(line)["message"] == message


def test_a_text_line_reads_well() -> None:
    """Plain values bare, others quoted, so that no client can forge a field."""
    line = TextFormatter().format(record("answered", request_id='a" status=500', tier="fp16", status=200))
    assert line.endswith(r'INFO halftone.x answered request_id="a\" status=500" tier=fp16 status=200')


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_process_writes_what_it_is_told_once(quiet: None, form: LogFormat) -> None:
    """However often it is configured; tracebacks too."""
    stream = io.StringIO()
    for _ in range(2):
        configure_logging(form, stream)
    try:
        raise ValueError("no such thing")
    except ValueError:
        logging.getLogger("halftone.tier").exception("it failed")
    logging.getLogger("serving.protocol").info("ready")
    written = stream.getvalue()
    assert written.count("it failed") == 1
    assert written.count("serving.protocol") == 1
    assert "ValueError: no such thing" in written
    if form == "json":
        assert [json.loads(line)["level"] for line in written.splitlines()] == ["ERROR", "INFO"]
