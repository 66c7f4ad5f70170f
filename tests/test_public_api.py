"""The names that people outside import: authors of models, operators' scripts, tools."""

import importlib
import inspect
from importlib.metadata import entry_points

import pytest

import serving
from serving.models.source import ModelSource

NAMES = [
    "serving:__version__",
    "serving.cli:main",
    "serving.config:Config",
    "serving.config:json_schema",
    "serving.config:load_config",
    "serving.config:parse_config",
    "serving.errors:ConfigError",
    "serving.errors:HalftoneError",
    "serving.errors:RequestError",
    "serving.gateway.tier_client:TierClient",
    "serving.models.echo:Echo",
    "serving.models.efficientnet:EfficientNetLite0",
    "serving.models.minilm:MiniLM",
    "serving.models.source:ModelSource",
    "serving.tensors:Signature",
    "serving.tensors:TensorSpec",
    "serving.tensors:Tensors",
]


@pytest.mark.parametrize("reference", NAMES)
def test_a_public_name_is_there(reference: str) -> None:
    """Moving one breaks somebody's code."""
    module, _, name = reference.partition(":")
    assert hasattr(importlib.import_module(module), name)


def test_config_exports_what_it_lists() -> None:
    """`__all__` is the contract of `serving.config`."""
    config = importlib.import_module("serving.config")
    assert len(set(config.__all__)) == len(config.__all__)
    assert all(hasattr(config, name) for name in config.__all__)


def test_a_source_needs_two_methods() -> None:
    """`build` and `examples`; everything else has a default."""
    assert ModelSource.__abstractmethods__ == {"build", "examples"}
    assert list(inspect.signature(ModelSource).parameters) == []


@pytest.mark.parametrize(
    ("method", "parameters"),
    [("preprocess", ["inputs"]), ("collate", ["parts"]), ("batch_key", ["tensors"]), ("examples", [])],
)
def test_what_a_source_may_override_keeps_its_parameters(method: str, parameters: list[str]) -> None:
    """Overrides in other people's code are written against these."""
    assert list(inspect.signature(getattr(ModelSource, method)).parameters) == ["self", *parameters]


def test_the_command_is_installed() -> None:
    """`halftone` is `serving.cli:main`."""
    (command,) = entry_points(group="console_scripts", name="halftone")
    assert command.value == "serving.cli:main"


def test_the_version_is_a_release() -> None:
    """Three numbers, maybe with a suffix."""
    assert serving.__version__[0].isdigit()
    assert len(serving.__version__.split(".")) >= 3
