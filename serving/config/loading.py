"""Reading a configuration: YAML -> `Config`, or a `ConfigError` that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from serving.config.checks import check_config, nearest
from serving.config.schema import PATTERN_HINTS, Config, ModelConfig
from serving.errors import ConfigError, quote

MAX_CONFIG_BYTES = 1 << 20
#: Values in the file, those behind an alias counted wherever the alias stands.
MAX_CONFIG_VALUES = 100_000


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses repeated keys and aliases that explode."""

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        if _expanded_size(node, {}) > MAX_CONFIG_VALUES:
            raise ConfigError(f"more than {MAX_CONFIG_VALUES} values, aliases expanded")
        return self.construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ConfigError, yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            # PyYAML lets out whatever int(), date() and the like raise: `0x_`, `2001-13-01`.
            tag = node.tag.rpartition(":")[2]
            raise ConfigError(f"line {node.start_mark.line + 1}: not a valid {tag}") from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(
                    f"line {key_node.start_mark.line + 1}: the key {quote(str(key))} is not text"
                )
            if key in keys:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: {key!r} stands twice")
            keys.add(key)
        return super().construct_mapping(node, deep)


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """How many values `node` stands for, itself included; `sizes` holds those known by now."""
    if id(node) not in sizes:
        sizes[id(node)] = MAX_CONFIG_VALUES + 1  # Until it is known: an alias within itself never ends.
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in children)
    return sizes[id(node)]


def load_config(path: Path) -> Config:
    """Read and check a configuration file.

    Relative `weights`, `tokens_file`, `tls_certificate`, `tls_key` and `divergence.capture.folder` are taken
    from the file's own folder.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or any field in it is wrong.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read {path}: {reason}") from error
    return parse_config(text, path.resolve().parent)


def parse_config(text: str, folder: Path | None = None) -> Config:
    """Parse and check a configuration. `folder` is where relative paths start.

    Raises:
        ConfigError: `text` is no YAML, or any field in it is wrong.
    """
    try:
        # A subclass of SafeLoader: it builds plain data only.
        data = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {_yaml_problem(error)}") from error
    except RecursionError as error:
        raise ConfigError("not valid YAML: nested too deeply") from error
    if not isinstance(data, dict):
        raise ConfigError("the configuration is a mapping with the keys server and models")
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise _first_problem(error) from error
    check_config(config)
    return _with_absolute_paths(config, folder) if folder else config


def _with_absolute_paths(config: Config, folder: Path) -> Config:
    server = config.server
    paths = {name: getattr(server, name) for name in ("tokens_file", "tls_certificate", "tls_key")}
    server = server.model_copy(update={name: folder / path for name, path in paths.items() if path})
    models = tuple(_model_with_absolute_paths(model, folder) for model in config.models)
    return config.model_copy(update={"server": server, "models": models})


def _model_with_absolute_paths(model: ModelConfig, folder: Path) -> ModelConfig:
    changed: dict[str, object] = {}
    if model.weights:
        changed["weights"] = folder / model.weights
    if capture := model.divergence.capture:
        capture = capture.model_copy(update={"folder": folder / capture.folder})
        changed["divergence"] = model.divergence.model_copy(update={"capture": capture})
    return model.model_copy(update=changed) if changed else model


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem


def _first_problem(error: ValidationError) -> ConfigError:
    problems = error.errors(include_url=False)
    # A misspelt key is two problems, one unknown and one missing; the first says how to mend it.
    problem = next((found for found in problems if found["type"] == "extra_forbidden"), problems[0])
    location = [part for part in problem["loc"] if part != "[key]"]
    path = _dotted(location)
    kind = problem["type"]
    if kind == "extra_forbidden":
        section = _section_at(Config, location[:-1])
        known = list(section.model_fields) if section else []
        return ConfigError(f"unknown key{nearest(str(location[-1]), known)}", path)
    if kind == "missing":
        return ConfigError("is missing", path)
    if kind == "string_pattern_mismatch":
        hint = PATTERN_HINTS.get(problem["ctx"]["pattern"], f"does not match {problem['ctx']['pattern']}")
        return ConfigError(f"{quote(str(problem['input']))}: {hint}", path)
    if kind == "literal_error":
        expected = problem["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return ConfigError(
            f"{quote(str(problem['input']))} is not valid{nearest(str(problem['input']), expected)}", path
        )
    message = problem["msg"].removeprefix("Value error, ")
    return ConfigError(message[0].lower() + message[1:], path)


def _dotted(location: list[int | str]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _section_at(section: type[BaseModel] | None, location: list[int | str]) -> type[BaseModel] | None:
    """The section type that stands at `location`, for the names it knows."""
    for part in location:
        if section is None:
            return None
        if isinstance(part, str) and part in section.model_fields:
            current: Any = section.model_fields[part].annotation
        else:
            continue  # An index, or a key of a mapping: the type was reached with the field.
        section = _section_type(current)
    return section


def _section_type(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    arguments = get_args(annotation) if get_origin(annotation) is not None else ()
    found = [section for argument in arguments if (section := _section_type(argument))]
    return found[-1] if found else None


def json_schema() -> dict[str, Any]:
    """JSON Schema of the configuration, for editors."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Halftone", **schema}
