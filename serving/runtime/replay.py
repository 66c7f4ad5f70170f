"""`halftone replay`: compute a captured row again on this machine, and say whether it comes out the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from serving.config import Config, ModelConfig
from serving.divergence.capture import Capture, read_capture
from serving.divergence.comparators import Figures, ShapesDiffer
from serving.divergence.comparison import OutputComparator
from serving.divergence.formats import FORMATS
from serving.errors import ConfigError
from serving.runtime.engine import Engine, open_plan_source
from serving.runtime.tier_plan import plan_tiers
from serving.tensors import Tensors, TensorSpec

#: A replayed figure within this factor of the recorded one shows the same divergence.
SAME_WITHIN = 2.0


def replay(path: Path, config: Config, say: Callable[[str], None]) -> bool:
    """Replay a capture. Returns whether the divergence shows again.

    Raises:
        ConfigError: the file is no capture, lacks inputs, or is of a model that the configuration lacks.
        HalftoneError: a tier does not load here.
    """
    capture = read_capture(path)
    facts = capture.facts
    model = _model_of(capture, config)
    say(f"{facts.model}/{facts.tier} against {facts.reference}: {facts.request_id}, {facts.captured_at}")
    outputs: dict[str, Tensors] = {}
    specs: tuple[TensorSpec, ...] = ()
    for plan in plan_tiers(config):
        if plan.model is model and plan.tier in {facts.tier, facts.reference}:
            source = open_plan_source(plan)
            engine = Engine.load(plan, source)
            recorded = facts.tiers.get(plan.tier, {}).get("effective", "unknown")
            say(f"  {plan.tier}: {engine.description.effective}, recorded as {recorded}")
            outputs[plan.tier] = engine.run(capture.inputs).outputs
            specs = source.signature.outputs
    compare = OutputComparator(specs, {tier: FORMATS[model.kind(tier)] for tier in model.tiers}, {})
    tier, reference = outputs[facts.tier], outputs[facts.reference]
    try:
        before = compare(facts.tier, capture.tier_outputs, capture.reference_outputs).row_figures()
        again = compare(facts.tier, tier, reference).row_figures()
        _say_figures(before, again, say)
        _say_bits(capture, tier, reference, say)
    except (ShapesDiffer, KeyError) as error:
        raise ConfigError(f"{path} has other outputs than model {facts.model} has now: {error}") from error
    metric = model.divergence.metric
    return _is_same(float(before[metric][0]), float(again[metric][0]))


def _model_of(capture: Capture, config: Config) -> ModelConfig:
    facts = capture.facts
    if facts.redacted:
        raise ConfigError(f"captured without {', '.join(facts.redacted)}: it cannot be replayed")
    model = next((model for model in config.models if model.name == facts.model), None)
    if model is None or not {facts.tier, facts.reference} <= set(model.tiers):
        raise ConfigError(f"no model {facts.model} with the tiers {facts.tier} and {facts.reference}")
    return model


def _say_figures(
    before: Mapping[str, Figures], again: Mapping[str, Figures], say: Callable[[str], None]
) -> None:
    say(f"  {'metric':<16}{'recorded':>12}{'replayed':>12}")
    for metric, values in again.items():
        say(f"  {metric:<16}{before[metric][0]:>12.4g}{values[0]:>12.4g}")


def _say_bits(capture: Capture, tier: Tensors, reference: Tensors, say: Callable[[str], None]) -> None:
    for name, recorded, found in (
        (capture.facts.tier, capture.tier_outputs, tier),
        (capture.facts.reference, capture.reference_outputs, reference),
    ):
        same = all(array.tobytes() == found[output].tobytes() for output, array in recorded.items())
        say(f"  {name}'s answer is {'the same to the bit' if same else 'not the same to the bit'}")


def _is_same(recorded: float, replayed: float) -> bool:
    if not (math.isfinite(recorded) and math.isfinite(replayed)):
        return math.isfinite(recorded) == math.isfinite(replayed)
    return recorded / SAME_WITHIN <= replayed <= recorded * SAME_WITHIN
