"""The command `halftone`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from serving import __version__
from serving.config import Config, load_config
from serving.errors import ConfigError, HalftoneError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 0, 1 when it failed, 2 on bad input."""
    # As with `python -m`: a model's module beside the caller is found.
    if "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except ConfigError as error:
        about = f"{options.config}: " if "config" in options else ""
        return _fail(f"{about}{error}", EXIT_BAD_INPUT)
    except HalftoneError as error:
        return _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_FAILED)
    except BrokenPipeError:
        return EXIT_FAILED
    return status


def _fail(message: str, status: int) -> int:
    print(f"halftone: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="halftone", description="Serve one PyTorch model at several precisions at once."
    )
    parser.add_argument("--version", action="version", version=f"halftone {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = _command(
        commands,
        "serve",
        "start a server; Ctrl-C drains and stops it",
        "halftone serve deployments/local.yaml --port 8000",
    )
    serve.add_argument("config", type=Path, metavar="CONFIG", help="the configuration, a YAML file")
    serve.add_argument("--port", type=int, help="instead of the configuration's server.port")
    serve.set_defaults(run=_serve)
    check = _command(
        commands,
        "check",
        "check a configuration; exit status 2 and the field's path when it is wrong",
        "halftone check deployments/local.yaml",
    )
    check.add_argument("config", type=Path, metavar="CONFIG", help="the configuration, a YAML file")
    check.add_argument(
        "--no-import", action="store_true", help="do not import the models' sources to see whether they exist"
    )
    check.set_defaults(run=_check)
    doctor = _command(
        commands,
        "doctor",
        "show devices, versions, and the precision that each kind of tier really gets here",
        "halftone doctor --card 910a",
    )
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.add_argument(
        "--card",
        action="append",
        choices=("910a", "910b", "310p"),
        default=[],
        help="rehearse this card on the CPU as well; may be given several times",
    )
    doctor.set_defaults(run=_doctor)
    tier = _command(
        commands,
        "tier",
        "take a tier out of service on a running server (trip), or put it back (reset)",
        "halftone tier trip text fp16 --reason 'new driver'",
    )
    tier.add_argument("action", choices=("trip", "reset"))
    tier.add_argument("model", metavar="MODEL")
    tier.add_argument("tier", metavar="TIER")
    tier.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    tier.add_argument("--tokens-file", type=Path, help="the server's; its first token is sent")
    tier.add_argument(
        "--ca-file", type=Path, help="PEM: trusted with an https URL, instead of the system's authorities"
    )
    tier.add_argument("--reason", help="for logs, and for other operators")
    tier.set_defaults(run=_tier)
    replay = _command(
        commands,
        "replay",
        "compute a captured row again on this machine; exit status 1 when the divergence does not show",
        "halftone replay captures/text-fp16-7-000001.safetensors deployments/local.yaml",
    )
    replay.add_argument("file", type=Path, metavar="FILE", help="a divergence capture")
    replay.add_argument(
        "model_config",
        type=Path,
        nargs="?",
        default=Path("deployments/local.yaml"),
        metavar="CONFIG",
        help="the configuration with its model (default: %(default)s)",
    )
    replay.set_defaults(run=_replay)
    schema = _command(
        commands,
        "schema",
        "print the configuration's JSON Schema, for editors",
        "halftone schema > halftone.schema.json",
    )
    schema.set_defaults(run=_schema)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, example: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:  {example}",
    )


def _load(options: argparse.Namespace) -> Config:
    from serving.config.checks import ineffective  # noqa: PLC0415

    config = load_config(options.config)
    for note in ineffective(config):
        print(f"halftone: note: {note}", file=sys.stderr)
    return config


def _serve(options: argparse.Namespace) -> int:
    config = _served_config(options)
    from serving.runtime.launch import serve  # noqa: PLC0415  Slow to import.

    serve(config, lambda line: print(line, flush=True), lambda: _served_config(options))
    return EXIT_OK


def _served_config(options: argparse.Namespace) -> Config:
    """The file's configuration, with what the command line says instead."""
    config = _load(options)
    if options.port is not None:
        if not 1 <= options.port <= 65535:  # noqa: PLR2004  TCP ports.
            raise ConfigError("--port is between 1 and 65535")
        server = config.server.model_copy(update={"port": options.port})
        config = config.model_copy(update={"server": server})
    _check_secrets(config)
    return config


def _check_secrets(config: Config) -> None:
    """Raise ConfigError where the server's tokens, certificate or key are not what they should be."""
    server = config.server
    if server.tokens_file:
        from serving.gateway.auth import load_tokens  # noqa: PLC0415

        load_tokens(server.tokens_file)
    if server.tls_certificate and server.tls_key:
        from serving.protocol.tls import server_context  # noqa: PLC0415

        server_context(server.tls_certificate, server.tls_key)


def _check(options: argparse.Namespace) -> int:
    config = _load(options)
    _check_secrets(config)
    for index, model in enumerate(config.models):
        if not options.no_import:
            from serving.models.resolve import open_source  # noqa: PLC0415  May import torch.

            try:
                open_source(model.source, model.declared_signature())
            except ConfigError as error:
                raise ConfigError(str(error), f"models[{index}].source") from error
        tiers = ", ".join(model.tiers)
        print(f"{model.name}: {tiers}; default {model.default or 'the most precise tier'}")
    return EXIT_OK


def _doctor(options: argparse.Namespace) -> int:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from serving.runtime.doctor import as_text, examine  # noqa: PLC0415  Imports torch.

    report = examine(options.card)
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return EXIT_OK


def _tier(options: argparse.Namespace) -> int:
    from serving.runtime.tier_command import set_tier  # noqa: PLC0415

    set_tier(
        options.action,
        options.model,
        options.tier,
        url=options.url,
        tokens_file=options.tokens_file,
        ca_file=options.ca_file,
        reason=options.reason,
    )
    print(f"{options.model}/{options.tier}: {options.action} done; gateways follow within a second")
    return EXIT_OK


def _replay(options: argparse.Namespace) -> int:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        config = load_config(options.model_config)
    except ConfigError as error:
        raise ConfigError(f"{options.model_config}: {error}") from error
    from serving.runtime.replay import replay  # noqa: PLC0415  Imports torch.

    shows = replay(options.file, config, print)
    print("the divergence shows again" if shows else "the divergence does not show here")
    return EXIT_OK if shows else EXIT_FAILED


def _schema(_options: argparse.Namespace) -> int:
    from serving.config import json_schema  # noqa: PLC0415

    print(json.dumps(json_schema(), indent=2))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
