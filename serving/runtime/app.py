"""The Serve application: a tier deployment per model and precision, gateways, and the hub."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from serving.config import Config
from serving.gateway.coalescer import BATCHES_PER_REPLICA
from serving.runtime.gateway_replica import GatewayReplica
from serving.runtime.hub_replica import HubReplica
from serving.runtime.tier_plan import TierPlan, plan_tiers
from serving.runtime.tier_replica import ChannelPlan, TierReplica

HUB_DEPLOYMENT = "hub"
GATEWAY_DEPLOYMENT = "gateway"
#: Serve notices a replica that ended when it asks next; its default is 10 s.
TIER_HEALTH_CHECK_PERIOD_S = 2.0

_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


def build_app(config: Config, channel_key: bytes) -> serve.Application:
    """The application of a checked configuration. `channel_key` is this run's secret."""
    hub = _deployment(HubReplica, HUB_DEPLOYMENT).bind(config)
    tiers: dict[str, dict[str, Any]] = {}
    for plan in plan_tiers(config):
        tiers.setdefault(plan.model.name, {})[plan.tier] = _tier(
            plan, config.server.gateways, hub, channel_key
        )
    gateway = _deployment(
        GatewayReplica,
        GATEWAY_DEPLOYMENT,
        num_replicas=config.server.gateways,
        graceful_shutdown_timeout_s=config.server.drain_timeout_s,
    )
    application: serve.Application = gateway.bind(config, tiers, hub, channel_key)
    return application


def _tier(plan: TierPlan, gateways: int, hub: Any, channel_key: bytes) -> Any:
    # Every gateway keeps BATCHES_PER_REPLICA batches under way per replica; twice that leaves
    # room for an uneven spread over replicas.
    max_inflight = 2 * BATCHES_PER_REPLICA * gateways
    deployment = _deployment(
        TierReplica,
        plan.deployment_name,
        num_replicas=plan.config.replicas,
        health_check_period_s=TIER_HEALTH_CHECK_PERIOD_S,
        max_ongoing_requests=max_inflight + 2,  # And reports.
        ray_actor_options=_actor_options(plan.resources),
    )
    return deployment.bind(plan, ChannelPlan(channel_key, max_inflight), hub)


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
