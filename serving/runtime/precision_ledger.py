"""The precision of every tier over all gateways: kept in the hub, told to gateways and Prometheus."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge

from serving.config import ModelConfig
from serving.divergence.budget import STATES
from serving.divergence.standing import FloorLedger, Standing, TierLedger
from serving.gateway.figures import Parcel
from serving.gateway.precision import budget_rule
from serving.gateway.precision_record import ModelFigures
from serving.routing.policy import RoutingTable


class PrecisionLedger:
    """Every tier's ledger."""

    def __init__(self, models: Sequence[ModelConfig], clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        #: Gateway process -> the number of its last parcel; each that has told what it remembers is in it.
        self._taken: dict[str, int] = {}
        #: Model and tier that a person decided about.
        self._set_by_hand: set[tuple[str, str]] = set()
        self._tiers: dict[str, dict[str, TierLedger]] = {}
        self._floors: dict[str, FloorLedger] = {}
        for model in models:
            reference = RoutingTable.of(model).reference
            if reference is None:
                continue
            rule = budget_rule(model)
            self._tiers[model.name] = {
                tier: TierLedger(f"{model.name}/{tier}", rule, clock)
                for tier in model.tiers
                if tier != reference
            }
            self._floors[model.name] = FloorLedger(rule.window, rule.quantile)
        self._state = Gauge(
            "halftone_budget_state",
            "1 for the state that the tier is in: serving, tripped or probing.",
            ("model", "tier", "state"),
            registry=self.registry,
        )
        self._ratio = Gauge(
            "halftone_budget_ratio",
            "The tier's divergence at the budget's quantile, as a share of the budget.",
            ("model", "tier"),
            registry=self.registry,
        )
        _show_rules(models, self._tiers, self.registry)
        self._show()

    def add(self, process: str, parcels: Iterable[Parcel]) -> None:
        """Take what a gateway compared. A parcel that came before is not counted again."""
        for parcel in parcels:
            if parcel.number > self._taken.get(process, 0):
                self._taken[process] = parcel.number
                for model, found in parcel.figures.items():
                    self._add_to(model, found)
        self._show()

    def _add_to(self, model: str, found: ModelFigures) -> None:
        for tier, rows in found.tiers.items():
            if ledger := self._tiers.get(model, {}).get(tier):
                ledger.add(rows)
        if model in self._floors:
            self._floors[model].add(found.floor)

    def restore(self, process: str, standings: Mapping[str, Mapping[str, Standing]]) -> None:
        """Take over what a gateway was told by a hub that is gone.

        Only with its first beat, and only tiers out of service: that is the safe side. What a
        person said since then counts more.
        """
        if process in self._taken:
            return
        self._taken[process] = 0
        for model, tiers in standings.items():
            for tier, known in tiers.items():
                ledger = self._tiers.get(model, {}).get(tier)
                if ledger is None or (model, tier) in self._set_by_hand:
                    continue
                if ledger.budget.state == "serving" and known.state != "serving":
                    ledger.budget.restore(known.state, known.is_held, known.reason)
        self._show()

    def set_by_hand(self, model: str, tier: str, action: str, reason: str) -> None:
        """Trip or reset a tier."""
        ledger = self._tiers[model][tier]
        if action == "trip":
            ledger.budget.trip(f"tripped {reason}")
        else:
            ledger.reset(f"reset {reason}")
        self._set_by_hand.add((model, tier))
        self._show()

    def standings(self) -> dict[str, dict[str, Standing]]:
        """Model -> tier -> what there is to tell."""
        return {
            model: {tier: ledger.standing(self._floors[model].floor()) for tier, ledger in tiers.items()}
            for model, tiers in self._tiers.items()
        }

    def _show(self) -> None:
        for model, tiers in self._tiers.items():
            for tier, ledger in tiers.items():
                for state in STATES:
                    self._state.labels(model, tier, state).set(ledger.budget.state == state)
                if math.isnan(ledger.budget.ratio):
                    self._ratio.remove(model, tier)
                else:
                    self._ratio.labels(model, tier).set(ledger.budget.ratio)


def _show_rules(
    models: Iterable[ModelConfig], tiers: Mapping[str, Iterable[str]], registry: CollectorRegistry
) -> None:
    """What the configuration tolerates, for rules and panels that compare with it."""
    limit = Gauge(
        "halftone_budget_limit",
        "The budget: what its metric may be, at its quantile.",
        ("model", "tier", "metric"),
        registry=registry,
    )
    allowed = Gauge(
        "halftone_budget_allowed_share",
        "The share of rows that may be over the budget: 1 - its quantile.",
        ("model", "tier"),
        registry=registry,
    )
    for model in models:
        for tier in tiers.get(model.name, ()):
            limit.labels(model.name, tier, model.divergence.metric).set(model.divergence.budget)
            allowed.labels(model.name, tier).set(1 - model.divergence.quantile)
