"""The Serve application: a tier deployment per model and precision, gateways, and the hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from serving.config import Config, ServerConfig
from serving.divergence.standing import Standing
from serving.gateway.coalescer import BATCHES_PER_REPLICA
from serving.runtime.gateway_replica import HAND_OVER_S, GatewayReplica
from serving.runtime.hub_replica import HubReplica
from serving.runtime.tier_plan import TierPlan, plan_tiers
from serving.runtime.tier_replica import CLOSE_TIMEOUT_S, ChannelPlan, TierReplica

HUB_DEPLOYMENT = "hub"
GATEWAY_DEPLOYMENT = "gateway"
#: Serve notices a replica that ended when it asks next; its default is 10 s.
TIER_HEALTH_CHECK_PERIOD_S = 2.0
#: A replica answers beside its device thread; one that does not, three times in a row, is stopped or
#: hangs, and Serve replaces it. Its default is 30 s.
TIER_HEALTH_CHECK_TIMEOUT_S = 5.0

#: For a replica to finish its batches when Serve stops it; one that hangs is killed then.
TIER_SHUTDOWN_TIMEOUT_S = CLOSE_TIMEOUT_S + 2.0

_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


def build_app(
    config: Config, channel_key: bytes, predecessor: Mapping[str, Mapping[str, Standing]] | None = None
) -> serve.Application:
    """The application of a checked configuration.

    Args:
        config: the whole one.
        channel_key: this run's secret.
        predecessor: what the application knows of its tiers that serves the port now; None when
            there is none.
    """
    hub = _deployment(HubReplica, HUB_DEPLOYMENT).bind(config, predecessor or {})
    tiers: dict[str, dict[str, Any]] = {}
    for plan in plan_tiers(config):
        tiers.setdefault(plan.model.name, {})[plan.tier] = _tier(plan, config.server, hub, channel_key)
    gateway = _deployment(
        GatewayReplica,
        GATEWAY_DEPLOYMENT,
        num_replicas=config.server.gateways,
        graceful_shutdown_timeout_s=config.server.drain_timeout_s + HAND_OVER_S,
    )
    application: serve.Application = gateway.bind(config, tiers, hub, channel_key, predecessor is not None)
    return application


def _tier(plan: TierPlan, server: ServerConfig, hub: Any, channel_key: bytes) -> Any:
    # Every gateway keeps BATCHES_PER_REPLICA batches under way per replica. All of them may be at
    # this one, where the others are lost; and while gateways are replaced there are twice as many.
    max_inflight = 2 * BATCHES_PER_REPLICA * server.gateways * plan.config.replicas
    deployment = _deployment(
        TierReplica,
        plan.deployment_name,
        num_replicas=plan.config.replicas,
        health_check_period_s=TIER_HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=TIER_HEALTH_CHECK_TIMEOUT_S,
        max_ongoing_requests=max_inflight + 2,  # And reports.
        graceful_shutdown_timeout_s=TIER_SHUTDOWN_TIMEOUT_S,
        ray_actor_options=_actor_options(plan.resources),
    )
    return deployment.bind(plan, ChannelPlan(channel_key, max_inflight, server.batch_limit_s), hub)


def _deployment(
    replica: type, name: str, *, ray_actor_options: dict[str, Any] | None = None, **options: Any
) -> Any:
    return serve.deployment(
        name=name,
        logging_config=_LOGGING,
        ray_actor_options=ray_actor_options or {"num_cpus": 0},
        **options,
    )(replica)


def _actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """Ray's actor options for configured resources: CPU and GPU have fields of their own."""
    own = {name: amount for name, amount in resources.items() if name not in {"CPU", "GPU"}}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": own,
    }
