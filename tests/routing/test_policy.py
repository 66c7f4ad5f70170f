"""The precision contract: the declared tier answers, or nobody."""

import itertools
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import PRECISION_RANK, ModelConfig, TierKind
from serving.config.checks import check_model
from serving.errors import BadPrecision
from serving.routing.declaration import METRICS, Tolerance
from serving.routing.policy import TOLERANCE_LABEL, RoutingTable, most_precise

KINDS: list[TierKind] = list(get_args(TierKind))
CLASS_NAMES = ["critical", "standard", "edge", "bulk", "default", "none", "other"]


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Any subset of the kinds under their own or other names, any classes, any default."""
    tiers = {kind: {} for kind in draw(st.lists(st.sampled_from(KINDS), unique=True, max_size=4))}
    named = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(KINDS)), max_size=3)
    tiers |= {name: {"kind": kind} for name, kind in draw(named if tiers else named.filter(len))}
    bound = st.dictionaries(st.sampled_from(CLASS_NAMES), st.sampled_from(sorted(tiers)))
    classes: dict[str, Any] = dict(draw(bound))
    ranks = {name: PRECISION_RANK[fields.get("kind", name)] for name, fields in tiers.items()}
    for name, tier in classes.items():
        lower = [other for other in sorted(tiers) if ranks[other] < ranks[tier]]
        if lower and draw(st.booleans()):
            classes[name] = {"tier": tier, "may_degrade_to": draw(st.sampled_from(lower))}
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


@given(
    models(),
    st.one_of(st.none(), st.sampled_from(["a", "b", "c", *KINDS, *CLASS_NAMES])),
    st.sets(st.sampled_from(["a", "b", "c", *KINDS])),
    st.sets(st.sampled_from(["a", "b", "c", *KINDS])),
)
def test_only_a_class_that_says_so_degrades(
    model: ModelConfig, declared: str | None, over_budget: set[str], full: set[str]
) -> None:
    """Whatever is over its budget or full: a lower tier answers a class that names it, or nobody does.

    So do requests that declare nothing, where such a class is their default. A tier over its
    budget is no way down, and a request that was moved up stays there.
    """
    table = RoutingTable.of(model)
    try:
        bound = table.decide(declared)
    except BadPrecision:
        return
    decision = table.within_budget(bound, lambda tier: tier not in over_budget)
    assert rank(model, decision.tier) >= rank(model, bound.tier)
    if decision.tier not in full:
        return
    lower = table.degraded(decision, lambda tier: tier not in over_budget)
    named = model.default if declared is None else declared
    rule = model.classes.get(named) if named else None
    if lower is None:
        return
    assert rule is not None
    assert lower.tier == rule.may_degrade_to
    assert lower.reason == "degraded"
    assert decision == bound
    assert rank(model, lower.tier) < rank(model, bound.tier)
    assert lower.tier not in over_budget
    assert table.degraded(lower, lambda _: True) is None


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


def over_budget(data: st.DataObject, model: ModelConfig) -> set[str]:
    """Any tiers; the reference may be claimed to be among them."""
    return data.draw(st.sets(st.sampled_from(sorted(model.tiers))))


@given(models(), st.data())
def test_a_tier_over_its_budget_gives_way_to_a_more_precise_one(
    model: ModelConfig, data: st.DataObject
) -> None:
    """Never to a less precise one, never to one over its own budget, to the least precise that is left."""
    table = RoutingTable.of(model)
    over = over_budget(data, model)
    declared = data.draw(st.sampled_from([None, *model.tiers, *model.classes]))
    asked = table.decide(declared)
    decision = table.within_budget(asked, lambda tier: tier not in over)
    assert rank(model, decision.tier) >= rank(model, asked.tier)
    assert decision.declared == asked.declared
    if decision.tier == asked.tier:
        assert decision == asked
        # Within its budget, or the reference, or nothing more precise could take its place.
        assert asked.tier not in over or asked.tier == table.reference or table.reference is None
    else:
        assert asked.tier in over
        assert decision.reason == "budget"
        assert decision.tier not in over or decision.tier == table.reference
        assert decision.passed_over[0] == asked.tier
        skipped = [
            tier
            for tier in model.tiers
            if rank(model, asked.tier) < rank(model, tier) < rank(model, decision.tier)
        ]
        assert all(tier in over for tier in (*skipped, *decision.passed_over))


@given(models())
def test_within_their_budgets_nothing_changes(model: ModelConfig) -> None:
    """For any declaration."""
    table = RoutingTable.of(model)
    for decision in (table.default, *table.decisions.values()):
        assert table.within_budget(decision, lambda _: True) is decision


@given(models(), st.sampled_from(METRICS), st.floats(1e-9, 1e9), st.data())
def test_a_tolerance_is_answered_by_a_tier_that_keeps_within_it(
    model: ModelConfig, metric: str, bound: float, data: st.DataObject
) -> None:
    """The least precise of them; the reference, which keeps within any, where there is no other."""
    table = RoutingTable.of(model)
    figures = st.floats(0, 1e9) | st.just(float("inf")) | st.just(float("nan"))
    bounds = {tier: data.draw(figures) for tier in sorted(model.tiers)}
    asked: list[tuple[str, str]] = []

    def bound_of(tier: str, of: str) -> float:
        asked.append((tier, of))
        return bounds[tier]

    if table.reference is None:
        with pytest.raises(BadPrecision, match="no fp32 tier"):
            table.decide_tolerance(Tolerance(metric, bound), bound_of)
        return
    decision = table.decide_tolerance(Tolerance(metric, bound), bound_of)
    assert {of for _, of in asked} <= {metric}
    assert (decision.reason, decision.declared) == ("tolerance", TOLERANCE_LABEL)
    assert decision.tier == table.reference or bounds[decision.tier] <= bound
    for tier in model.tiers:
        if bounds[tier] <= bound and tier != table.reference:
            assert rank(model, decision.tier) <= rank(model, tier)
    assert decision.tier not in decision.passed_over
    assert all(rank(model, tier) <= rank(model, decision.tier) for tier in decision.passed_over)


def test_tiers_that_a_tolerance_passes_over_are_named() -> None:
    """They are compared, so that the next request of the kind may be answered by them."""
    fields = {"name": "m", "source": "a:b", "tiers": {"fp32": {}, "mixed": {}, "fp16": {}}}
    table = RoutingTable.of(ModelConfig.model_validate(fields))
    tolerance = Tolerance("rel_l2", 1e-3)
    assert table.decide_tolerance(tolerance, lambda *_: float("inf")).passed_over == ("fp16", "mixed")
    assert table.decide_tolerance(tolerance, lambda tier, _: float(tier != "mixed")).passed_over == ("fp16",)
    assert table.decide_tolerance(tolerance, lambda *_: 0.0).passed_over == ()


def test_the_reference_is_the_first_fp32_tier() -> None:
    """By kind, not by name; None without one."""
    tiers = {"fp16": {}, "exact": {"kind": "fp32"}, "fp32": {}}
    fields = {"name": "m", "source": "a:b"}
    assert RoutingTable.of(ModelConfig.model_validate({**fields, "tiers": tiers})).reference == "exact"
    assert RoutingTable.of(ModelConfig.model_validate({**fields, "tiers": {"fp16": {}}})).reference is None


def test_a_second_fp32_tier_has_the_reference_behind_it() -> None:
    """It may be over its budget too: its device may be broken."""
    tiers = {"fp32": {}, "other": {"kind": "fp32"}, "fp16": {}}
    table = RoutingTable.of(ModelConfig.model_validate({"name": "m", "source": "a:b", "tiers": tiers}))
    decision = table.within_budget(table.decide("other"), lambda tier: tier == "fp16")
    assert (decision.tier, decision.reason, decision.passed_over) == ("fp32", "budget", ("other",))
    assert table.within_budget(table.decide("fp32"), lambda _: False).tier == "fp32"
