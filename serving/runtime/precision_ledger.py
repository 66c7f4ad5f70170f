"""The precision of every tier over all gateways: kept in the hub, told to gateways and Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Gauge

from serving.config import ModelConfig
from serving.divergence.budget import STATES
from serving.divergence.standing import FloorLedger, Standing, TierLedger
from serving.gateway.precision import budget_rule
from serving.gateway.precision_record import ModelFigures
from serving.routing.policy import RoutingTable

#: From the hub's start, in which it takes over what gateways remember of a hub before it.
RESTORE_WINDOW_S = 5.0


class PrecisionLedger:
    """Every tier's ledger."""

    def __init__(self, models: Iterable[ModelConfig], clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._restore_until_s = clock() + RESTORE_WINDOW_S
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
        self._show()

    def add(self, figures: Mapping[str, ModelFigures]) -> None:
        """Take what a gateway compared."""
        for model, found in figures.items():
            for tier, rows in found.tiers.items():
                self._tiers[model][tier].add(rows)
            self._floors[model].add(found.floor)
        self._show()

    def restore(self, standings: Mapping[str, Mapping[str, Standing]]) -> None:
        """Take over what a gateway was told by a hub that is gone.

        Only just after the start, and only a tier out of service: that is the safe side.
        """
        if self._clock() > self._restore_until_s:
            return
        for model, tiers in standings.items():
            for tier, known in tiers.items():
                ledger = self._tiers.get(model, {}).get(tier)
                if ledger is not None and ledger.budget.state == "serving" and known.state != "serving":
                    ledger.budget.restore(known.state, known.is_held, known.reason)
        self._show()

    def set_by_hand(self, model: str, tier: str, action: str, reason: str) -> None:
        """Trip or reset a tier."""
        budget = self._tiers[model][tier].budget
        if action == "trip":
            budget.trip(f"tripped {reason}")
        else:
            budget.reset(f"reset {reason}")
        # A gateway that has not heard of it yet must not undo it.
        self._restore_until_s = self._clock()
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
                if ledger.budget.samples:
                    self._ratio.labels(model, tier).set(ledger.budget.ratio)
