"""The command: exit statuses, messages on stderr, help with examples."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from serving import __version__
from serving.cli import main

ROOT = Path(__file__).parent.parent
DEPLOYMENTS = sorted((ROOT / "deployments").glob("*.yaml"))
COMMANDS = ["serve", "check", "schema"]
ECHO = "models: [{name: e, source: 'serving.models.echo:Echo', tiers: {fp32: {}, fp16: {}}}]\n"


@pytest.fixture(autouse=True)
def _same_import_path() -> Iterator[None]:
    """The command adds the current folder to the import path."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def written(folder: Path, text: str) -> str:
    """A configuration file."""
    file = folder / "config.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """That can be pasted."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"example: halftone {command}" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """And what each does."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert all(command in said for command in COMMANDS)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The package's."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"halftone {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["sreve"], ["check"], ["serve", "x", "--port", "http"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the usage on stderr, nothing on stdout."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert said.out == ""
    assert "usage: halftone" in said.err


@pytest.mark.parametrize("file", DEPLOYMENTS, ids=lambda file: file.name)
def test_check_passes_the_deployments(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sources included; one line for each model."""
    assert main(["check", str(file)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "fp16" in said.out


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("server: {prot: 1}\n" + ECHO, "server.prot"),
        (ECHO.replace("fp16", "fp61"), "models[0].tiers.fp61"),
        (ECHO.replace("echo:Echo", "echo:Ehco"), "models[0].source"),
        (ECHO.replace("models.echo", "models.ohce"), "models[0].source"),
        (ECHO.replace("serving.models.echo:Echo", "json:loads"), "models[0].source"),
        ("server: {tokens_file: gone}\n" + ECHO, "server.tokens_file"),
        ('server: {tokens_file: "\\0"}\n' + ECHO, "server.tokens_file"),
        ("server: {tls_certificate: gone}\n" + ECHO, "server.tls_certificate"),
        ("server: {tls_certificate: gone, tls_key: gone}\n" + ECHO, "server.tls_certificate"),
    ],
)
def test_check_refuses_with_status_2_and_the_fields_path(
    text: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr that names the file and the field."""
    file = written(tmp_path, text)
    assert main(["check", file]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"halftone: {file}: {path}: ")
    assert said.err.count("\n") == 1


def test_check_can_leave_sources_alone(tmp_path: Path) -> None:
    """For a machine where the model is not installed."""
    file = written(tmp_path, ECHO.replace("serving.models.echo", "not_installed"))
    assert main(["check", file]) == 2
    assert main(["check", "--no-import", file]) == 0


def test_check_names_keys_without_effect_and_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr: stdout stays what a script reads."""
    assert main(["check", written(tmp_path, "server: {grpc_port: 9}\n" + ECHO)]) == 0
    said = capsys.readouterr()
    assert said.err == "halftone: note: server.grpc_port: gRPC is not served yet\n"
    assert said.out == "e: fp32, fp16; default the most precise tier\n"


def test_a_source_that_raises_is_refused_by_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When imported, and when made."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_on_import.py").write_text("raise OSError('no card')\n")
    (tmp_path / "broken_when_made.py").write_text(
        "from serving.models.echo import Echo\n"
        "class Broken(Echo):\n    def __init__(self):\n        raise OSError('no card')\n"
    )
    for reference in ("broken_on_import:x", "broken_when_made:Broken"):
        file = written(tmp_path, ECHO.replace("serving.models.echo:Echo", reference))
        assert main(["check", file]) == 2
        said = capsys.readouterr().err
        assert f"{file}: models[0].source: " in said
        assert "OSError: no card" in said


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_missing_file_is_status_2(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its name and the reason."""
    file = tmp_path / "gone.yaml"
    assert main([command, str(file)]) == 2
    assert f"cannot read {file}: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "-1", "65536", "99999999999999999999"])
def test_serve_refuses_a_port_that_is_none(
    port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts."""
    assert main(["serve", written(tmp_path, ECHO), "--port", port]) == 2
    assert "--port is between 1 and 65535" in capsys.readouterr().err


def test_serve_refuses_bad_tokens_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message never holds a token."""
    (tmp_path / "tokens").write_text("alice short\n")
    assert main(["serve", written(tmp_path, "server: {tokens_file: tokens}\n" + ECHO)]) == 2
    said = capsys.readouterr().err
    assert "at least 16 characters" in said
    assert "short" not in said


def test_the_schema_accepts_the_deployments(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a JSON Schema, and editors show no error on what is right."""
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for file in DEPLOYMENTS:
        validator.validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize(
    "text",
    ["server: {prot: 1}\n" + ECHO, ECHO.replace("fp32: {}", "fp32: {replicas: 0}"), "models: []", "{}"],
)
def test_the_schema_refuses_what_check_refuses(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown keys, bounds, what is missing."""
    main(["schema"])
    schema = json.loads(capsys.readouterr().out)
    assert not Draft202012Validator(schema).is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        ECHO.replace("fp32: {}", "fp32: null"),
        ECHO.replace("tiers", "classes: {a: fp16, b: {tier: fp32}}, tiers"),
    ],
)
def test_the_schema_accepts_the_short_forms(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`fp32:` with nothing behind it, and `class: tier`."""
    main(["schema"])
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator(schema).validate(yaml.safe_load(text))


def test_a_reader_that_closes_early_is_no_traceback() -> None:
    """`halftone schema | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "serving.cli", "schema"],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode != 0
    assert b"Traceback" not in done.stderr
