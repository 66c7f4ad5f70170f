"""Lines of the cluster's processes: Halftone's own as they are, the others with their process."""

import json

import pytest

from serving.runtime.worker_output import _print, printed

TEXT = "2026-01-31T12:00:00.123Z INFO halftone.gateway tier m/fp32: fp32-ieee on x"
JSON = '{"time": "2026-01-31T12:00:00.123Z", "level": "INFO"}'


@pytest.mark.parametrize(("line", "form"), [(TEXT, "text"), (JSON, "json")])
def test_our_own_lines_are_left_alone(line: str, form: str) -> None:
    """They say already who wrote them."""
    assert printed(line, "gateway pid=7", form) == line  # type: ignore[arg-type]


def test_others_say_where_they_come_from() -> None:
    """A model's print, a traceback; in JSON each is an object."""
    assert printed("hello", "tier pid=7", "text") == "(tier pid=7) hello"
    for line in ("hello", TEXT, "{not json", 'quo"te'):
        document = json.loads(printed(line, "tier pid=7", "json"))
        assert (document["message"], document["process"]) == (line, "tier pid=7")


def test_streams_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """What was stderr is stderr; Ray's autoscaler has nothing to say."""
    for pid, is_err, line in ((7, True, "bad"), (7, False, "good"), ("autoscaler", False, "status")):
        _print({"pid": pid, "is_err": is_err, "lines": [line], "actor_name": "tier"}, "text")
    out, err = capsys.readouterr()
    assert (out, err) == ("(tier pid=7) good\n", "(tier pid=7) bad\n")
