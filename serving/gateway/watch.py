"""Watching the tiers: a gateway learns what each one is, and notices when that changes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Literal

from serving.errors import ConfigError, HalftoneError
from serving.gateway.model import Lane, ServedModel
from serving.gateway.tier_client import TierDescription, TierReport
from serving.models.resolve import CallableSource, open_source
from serving.models.source import ModelSource
from serving.observe.metrics import GatewayMetrics
from serving.tensors import Signature

logger = logging.getLogger("halftone.gateway")

#: Between two reports of a tier.
REPORT_INTERVAL_S = 1.0
#: For the first report to arrive: a loading tier answers when it has loaded.
LOAD_TIMEOUT_S = 300.0
#: For every other one. A replica reports beside its device thread, however busy that is.
REPORT_TIMEOUT_S = 5.0


async def watch_lane(model: ServedModel, lane: Lane, metrics: GatewayMetrics) -> None:
    """Ask a tier what it is, again and again, until cancelled."""
    while True:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S if lane.description is None else REPORT_TIMEOUT_S):
                report = await lane.client.report(with_example=not model.example)
            await take_report(model, lane, report, metrics)
            lane.is_silent = False
        except Exception as error:
            # What the tier was stays true for its other replicas, and for the ones to come.
            if not lane.is_silent:
                logger.warning("tier %s/%s: a report did not come: %r", model.name, lane.tier, error)
            lane.is_silent = True
        await asyncio.sleep(REPORT_INTERVAL_S)


async def take_report(model: ServedModel, lane: Lane, report: TierReport, metrics: GatewayMetrics) -> None:
    """Apply a tier's report: open the model with the first signature, note the description."""
    new = report.description
    try:
        await _open_model(model, report)
    except HalftoneError as error:
        # The tier may be fine, yet no request reaches it. The next report tries again.
        new = replace(new, failure=new.failure or f"the gateway cannot open the model: {error}")
    previous, lane.description = lane.description, new
    if new == previous:
        return
    if previous is not None and _is_served(previous):
        metrics.tier_info.remove(*_info_labels(lane, previous))
    if _is_served(new):
        metrics.tier_info.labels(*_info_labels(lane, new)).set(1)
        logger.info("tier %s/%s: %s on %s", model.name, lane.tier, new.effective, new.soc)
    else:
        logger.error("tier %s/%s does not serve: %s", model.name, lane.tier, new.failure or new.unavailable)


def _is_served(description: TierDescription) -> bool:
    return description.failure is None and description.unavailable is None


def _info_labels(lane: Lane, description: TierDescription) -> tuple[str, ...]:
    return (lane.model_name, lane.tier, description.device, description.soc, description.effective)


async def _open_model(model: ServedModel, report: TierReport) -> None:
    """Open the model, unless it is open or the report tells no signature; take the first example.

    Raises:
        HalftoneError: this process cannot make the source.
    """
    if report.signature is None:
        return
    if model.source is None:
        source = await _source_of(model, report.signature, report.is_plain)
        if model.source is None:  # Another tier's report may have come first.
            model.open(source, report.signature)
    if not model.example:  # The tier that opened the model may have failed before it had one.
        model.example = report.example


async def _source_of(model: ServedModel, signature: Signature, is_plain: bool) -> ModelSource:
    """The source for preprocessing and collating. A plain callable needs no import here."""
    reference = model.config.source
    if is_plain:
        return CallableSource(_never_built, signature, reference)
    return await asyncio.to_thread(open_source, reference, model.config.declared_signature())


def _never_built() -> Literal[None]:
    raise ConfigError("a gateway builds no model")
