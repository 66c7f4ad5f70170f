"""The configuration: typed, frozen, read once, refused whole when anything in it is wrong."""

from serving.config.divergence import CaptureConfig, Divergence, DivergenceMetric
from serving.config.loading import json_schema, load_config, parse_config
from serving.config.precision_rank import PRECISION_RANK
from serving.config.schema import (
    Batching,
    ClassRule,
    Config,
    Guard,
    ModelConfig,
    ServerConfig,
    TierConfig,
    TierKind,
)

__all__ = [
    "PRECISION_RANK",
    "Batching",
    "CaptureConfig",
    "ClassRule",
    "Config",
    "Divergence",
    "DivergenceMetric",
    "Guard",
    "ModelConfig",
    "ServerConfig",
    "TierConfig",
    "TierKind",
    "json_schema",
    "load_config",
    "parse_config",
]
