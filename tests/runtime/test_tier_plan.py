"""What each replica loads, and how the cores are shared."""

import os
import pickle
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.config import Config
from serving.runtime.tier_plan import TierPlan, plan_tiers


def config_of(*models: dict[str, dict[str, Any]]) -> Config:
    """Models `m0`, `m1` … with these tiers."""
    return Config.model_validate(
        {
            "models": [
                {"name": f"m{index}", "source": "a:b", "tiers": tiers} for index, tiers in enumerate(models)
            ]
        }
    )


TIERS = st.dictionaries(
    st.sampled_from(["fp32", "fp16", "mixed", "bf16"]),
    st.fixed_dictionaries(
        {"replicas": st.integers(1, 20)}, optional={"threads": st.one_of(st.none(), st.integers(1, 64))}
    ),
    min_size=1,
)


@given(st.lists(TIERS, min_size=1, max_size=3), st.integers(1, 256))
def test_every_tier_has_a_plan_and_its_share_of_the_cores(
    models: list[dict[str, dict[str, Any]]], cores: int
) -> None:
    """Never none, never more than there are, unless the operator says so."""
    plans = plan_tiers(config_of(*models), cores)
    assert [(plan.model.name, plan.tier) for plan in plans] == [
        (f"m{index}", tier) for index, tiers in enumerate(models) for tier in tiers
    ]
    assert all(plan.threads >= 1 for plan in plans)
    assert all(plan.threads == plan.config.threads for plan in plans if plan.config.threads)
    shared = [plan for plan in plans if not plan.config.threads]
    replicas = sum(plan.config.replicas for plan in plans)
    assert all(plan.threads == max(1, cores // replicas) for plan in shared)
    assert sum(plan.threads * plan.config.replicas for plan in shared) <= max(cores, replicas)


@given(st.lists(TIERS, min_size=1, max_size=3))
def test_deployment_names_are_unique(models: list[dict[str, dict[str, Any]]]) -> None:
    """Over models and tiers: no name holds the colon between them."""
    names = [plan.deployment_name for plan in plan_tiers(config_of(*models), 1)]
    assert len(set(names)) == len(names)
    assert all(name.count(":") == 1 for name in names)


def test_the_cores_are_those_that_this_process_may_use() -> None:
    """In a container that is fewer than the machine has."""
    (plan,) = plan_tiers(config_of({"fp32": {}}))
    assert plan.threads == len(os.sched_getaffinity(0))


def test_a_plan_knows_its_tiers_kind() -> None:
    """Where the name is another."""
    (plan,) = plan_tiers(config_of({"fast": {"kind": "fp16"}}), 1)
    assert (plan.tier, plan.kind) == ("fast", "fp16")


def test_a_plan_travels_to_its_replica() -> None:
    """It is plain data."""
    (plan,) = plan_tiers(config_of({"fp32": {"resources": {"NPU": 1}}}), 4)
    back = pickle.loads(pickle.dumps(plan))  # noqa: S301  Our own.
    assert isinstance(back, TierPlan)
    assert back == plan
