"""The precision contract: the declared tier answers, or nobody."""

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import ModelConfig, TierKind
from serving.config.checks import check_model
from serving.errors import BadPrecision
from serving.routing.policy import PRECISION_RANK, RoutingTable, most_precise

KINDS: list[TierKind] = list(get_args(TierKind))
CLASS_NAMES = ["critical", "standard", "edge", "bulk", "default", "none", "other"]


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any subset of the kinds under their own or other names, any classes, any default."""
    tiers = {kind: {} for kind in draw(st.lists(st.sampled_from(KINDS), unique=True, max_size=4))}
    named = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(KINDS)), max_size=3)
    tiers |= {name: {"kind": kind} for name, kind in draw(named if tiers else named.filter(len))}
    bound = st.dictionaries(st.sampled_from(CLASS_NAMES), st.sampled_from(sorted(tiers)))
    classes = draw(bound)
    default = draw(st.sampled_from([None, *tiers, *classes]))
    model = ModelConfig.model_validate(
        {"name": "m", "source": "a:b", "tiers": tiers, "classes": classes, "default": default}
    )
    check_model(model, "models[0]")
    return model


def rank(model: ModelConfig, tier: str) -> int:
    """How precise a tier is."""
    return PRECISION_RANK[model.kind(tier)]


@given(models(), st.data())
def test_a_declared_tier_answers_itself(model: ModelConfig, data: st.DataObject) -> None:
    """Not a faster one, not a better one."""
    tier = data.draw(st.sampled_from(sorted(model.tiers)))
    decision = RoutingTable.of(model).decide(tier)
    assert (decision.tier, decision.reason, decision.declared) == (tier, "tier", tier)


@given(models().filter(lambda model: model.classes), st.data())
def test_a_class_is_answered_by_its_tier(model: ModelConfig, data: st.DataObject) -> None:
    """As the operator bound it."""
    name = data.draw(st.sampled_from(sorted(model.classes)))
    decision = RoutingTable.of(model).decide(name)
    assert decision.tier == model.classes[name].tier
    assert (decision.reason, decision.declared) == (f"class={name}", name)


@given(models())
def test_a_request_that_declares_nothing_gets_the_default(model: ModelConfig) -> None:
    """The configured one, or the most precise tier."""
    decision = RoutingTable.of(model).decide(None)
    if model.default is None:
        assert rank(model, decision.tier) == max(rank(model, tier) for tier in model.tiers)
    else:
        rule = model.classes.get(model.default)
        assert decision.tier == (rule.tier if rule else model.default)
    assert (decision.reason, decision.declared) == ("default", "default")


@given(
    models(),
    st.one_of(st.none(), st.text(), st.sampled_from(["a", "b", "c", *KINDS, *CLASS_NAMES, "FP32", "fp32 "])),
)
def test_whatever_is_declared_is_honoured_or_refused(model: ModelConfig, declared: str | None) -> None:
    """Never less precise than declared; labels come from the configuration only."""
    table = RoutingTable.of(model)
    try:
        decision = table.decide(declared)
    except BadPrecision:
        assert declared not in {None, *model.tiers, *model.classes}
        return
    assert declared in {None, *model.tiers, *model.classes}
    if declared in model.tiers:
        assert rank(model, decision.tier) >= rank(model, declared)
    if declared in model.classes:
        assert rank(model, decision.tier) >= rank(model, model.classes[declared].tier)
    assert decision.tier in model.tiers
    assert decision.declared in {*model.tiers, *model.classes, "default"}
    assert decision.reason in {"tier", "default", *(f"class={name}" for name in model.classes)}


@given(models())
def test_a_table_cannot_be_changed(model: ModelConfig) -> None:
    """It is made once and shared by all requests."""
    table = RoutingTable.of(model)
    with pytest.raises(TypeError):
        table.decisions["fp32"] = table.default  # type: ignore[index]
    with pytest.raises(AttributeError):
        table.default = table.default  # type: ignore[misc]


def test_more_bits_of_significand_are_more_precise() -> None:
    """24, then 24 in part, 11, 8."""
    order: list[TierKind] = ["fp32", "layercast", "tf32", "autocast", "mixed", "fp16", "bf16"]
    ranks = [PRECISION_RANK[kind] for kind in order]
    assert {*order, "hf32"} == set(KINDS) == set(PRECISION_RANK)
    assert all(more > less for more, less in itertools.pairwise(ranks))
    assert PRECISION_RANK["hf32"] == PRECISION_RANK["tf32"]


def test_among_equals_the_first_is_the_most_precise() -> None:
    """The operator's order decides."""
    tiers = {"low": {"kind": "fp16"}, "one": {"kind": "fp32"}, "two": {"kind": "fp32"}}
    model = ModelConfig.model_validate({"name": "m", "source": "a:b", "tiers": tiers})
    assert most_precise(model) == "one"


def test_a_refusal_quotes_what_was_declared() -> None:
    """Without its control characters, beside every valid name."""
    fields = {"name": "m", "source": "a:b", "tiers": {"fp32": {}, "fp16": {}}, "classes": {"bulk": "fp16"}}
    model = ModelConfig.model_validate(fields)
    with pytest.raises(
        BadPrecision, match=r"'fp\\n16' is neither a tier nor a class here; valid: fp32, fp16, bulk"
    ):
        RoutingTable.of(model).decide("fp\n16")


@pytest.mark.parametrize("declared", ["", " ", "fp32 ", "FP32", "fp3", "fp16", "class=bulk", "default", "*"])
def test_only_an_exact_name_is_understood(declared: str) -> None:
    """No guess is made at what somebody may have meant."""
    fields = {"name": "m", "source": "a:b", "tiers": {"fp32": {}}, "classes": {"bulk": "fp32"}}
    with pytest.raises(BadPrecision):
        RoutingTable.of(ModelConfig.model_validate(fields)).decide(declared)
