"""What one tier's replica has to load: plain data, sent to its process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from serving.config import Config, ModelConfig, TierConfig, TierKind
from serving.observe.logs import LogFormat

#: Ray Serve's name of the whole application.
APP_NAME = "halftone"

_RESOURCES: Mapping[str, dict[str, float]] = {"npu": {"NPU": 1.0}, "cuda": {"GPU": 1.0}}


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of one model."""

    model: ModelConfig
    tier: str
    threads: int
    #: Of the lines that its processes write.
    log: LogFormat = "text"

    @property
    def config(self) -> TierConfig:
        """The tier's own section."""
        return self.model.tiers[self.tier]

    @property
    def kind(self) -> TierKind:
        """The tier's kind."""
        return self.model.kind(self.tier)

    @property
    def device(self) -> str:
        """The kind of device: the tier's own, or else the model's."""
        return self.config.device or self.model.device

    @property
    def card(self) -> str:
        """The card to rehearse. A tier that asks for the CPU itself gets the CPU as it is."""
        return "ieee" if self.model.card == "auto" or self.config.device == "cpu" else self.model.card

    @property
    def resources(self) -> dict[str, float]:
        """Ray resources of one replica. A tier on a card takes one, unless configured otherwise."""
        return self.config.resources or _RESOURCES.get(self.device, {})

    @property
    def deployment_name(self) -> str:
        """Its name in Serve, unique over models and tiers."""
        return deployment_name(self.model.name, self.tier)


def deployment_name(model: str, tier: str) -> str:
    """A tier's name in Serve, unique over models and tiers: no name holds a colon."""
    return f"{model}:{tier}"


def plan_tiers(config: Config, cores: int | None = None) -> list[TierPlan]:
    """A plan for every tier. Replicas share the cores, since torch would take all in each.

    Args:
        config: a checked configuration.
        cores: of the machine; counted when None.
    """
    cores = cores or len(os.sched_getaffinity(0))
    replicas = sum(tier.replicas for model in config.models for tier in model.tiers.values())
    share = max(1, cores // replicas)
    return [
        TierPlan(model, name, tier.threads or share, config.server.log)
        for model in config.models
        for name, tier in model.tiers.items()
    ]
