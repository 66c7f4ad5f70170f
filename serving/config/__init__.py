"""The configuration: typed, frozen, read once, refused whole when anything in it is wrong."""

from serving.config.loading import json_schema, load_config, parse_config
from serving.config.schema import (
    Batching,
    ClassRule,
    Config,
    Divergence,
    Guard,
    ModelConfig,
    ServerConfig,
    TierConfig,
    TierKind,
)

__all__ = [
    "Batching",
    "ClassRule",
    "Config",
    "Divergence",
    "Guard",
    "ModelConfig",
    "ServerConfig",
    "TierConfig",
    "TierKind",
    "json_schema",
    "load_config",
    "parse_config",
]
