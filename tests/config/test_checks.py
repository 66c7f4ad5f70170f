"""What a configuration must satisfy beyond types: names, references, and what this version serves."""

from typing import Any

import pytest
import yaml

from serving.config import Config, parse_config
from serving.config.checks import check_config, ineffective, nearest
from serving.errors import ConfigError

TENSOR = {"name": "x", "dtype": "FP32", "shape": [-1, 2]}


def refused(*models: dict[str, Any]) -> ConfigError:
    """Why these models are refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(yaml.safe_dump({"models": [model(**fields) for fields in models]}))
    return caught.value


def model(**fields: Any) -> dict[str, Any]:
    """A model with two tiers, changed."""
    return {"name": "m", "source": "a:b", "tiers": {"fp32": {}, "fp16": {}}, **fields}


@pytest.mark.parametrize(
    ("field", "words"),
    [("tls_certificate", "needs its private key"), ("tls_key", "there is no server.tls_cert")],
)
def test_tls_is_not_half_configured(field: str, words: str) -> None:
    """Half of it must not become plain HTTP."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_config(yaml.safe_dump({"server": {field: "file.pem"}, "models": [model()]}))
    assert caught.value.path == f"server.{field}"


CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("class-is-tier", {"classes": {"fp16": "fp32"}}, "models[0].classes.fp16", "names a tier"),
    ("class-is-kind", {"classes": {"bf16": "fp32"}}, "models[0].classes.bf16", "names a tier"),
    ("class-to-nowhere", {"classes": {"c": "fp61"}}, "models[0].classes.c", "did you mean 'fp16'?"),
    ("class-to-class", {"classes": {"c": "d", "d": "fp16"}}, "models[0].classes.c", "no tier 'd'"),
    ("default-unknown", {"default": "fp3"}, "models[0].default", "did you mean 'fp32'?"),
    ("default-far-off", {"default": "zzz"}, "models[0].default", "one of fp16, fp32"),
    ("tier-no-kind", {"tiers": {"fast": {}}}, "models[0].tiers.fast", "say kind: "),
    ("tier-misspelt", {"tiers": {"fp61": {}}}, "models[0].tiers.fp61", "did you mean 'fp16'?"),
    ("tier-misleads", {"tiers": {"fp32": {"kind": "fp16"}}}, "models[0].tiers.fp32", "mislead"),
    ("keep-on-fp16", {"tiers": {"fp16": {"keep_fp32": ["a"]}}}, "models[0].tiers.fp16.keep_fp32", "mixed"),
    ("native-fp32", {"tiers": {"fp32": {"native": True}}}, "models[0].tiers.fp32.native", "no 16-bit"),
    ("card-on-npu", {"card": "910a", "device": "npu"}, "models[0].device", "rehearsed on a CPU"),
    (
        "card-on-cuda",
        {"card": "310p", "tiers": {"fp16": {"device": "cuda"}}},
        "models[0].tiers.fp16.device",
        "rehearsed on a CPU",
    ),
    (
        "buckets-end-early",
        {"tiers": {"fp16": {"batching": {"buckets": [1, 4]}}}},
        "models[0].tiers.fp16.batching.buckets",
        "the largest bucket is max_rows, 32",
    ),
    (
        "buckets-end-late",
        {"tiers": {"fp16": {"batching": {"buckets": [64], "max_rows": 32}}}},
        "models[0].tiers.fp16.batching.buckets",
        "the largest bucket is max_rows, 32",
    ),
    (
        "degrade-to-nowhere",
        {"classes": {"c": {"tier": "fp32", "may_degrade_to": "fp61"}}},
        "models[0].classes.c.may_degrade_to",
        "did you mean 'fp16'?",
    ),
    (
        "degrade-to-the-same",
        {"classes": {"c": {"tier": "fp32", "may_degrade_to": "fp32"}}},
        "models[0].classes.c.may_degrade_to",
        "'fp32' is not less precise than 'fp32'",
    ),
    (
        "degrade-upwards",
        {"classes": {"c": {"tier": "fp16", "may_degrade_to": "fp32"}}},
        "models[0].classes.c.may_degrade_to",
        "is not less precise",
    ),
    (
        "graphs-without-buckets",
        {"tiers": {"fp16": {"graphs": True}}},
        "models[0].tiers.fp16.graphs",
        "say batching.buckets",
    ),
    (
        "graphs-on-cpu",
        {"tiers": {"fp16": {"graphs": True, "device": "cpu", "batching": {"buckets": "auto"}}}},
        "models[0].tiers.fp16.graphs",
        "a CPU has no graphs",
    ),
    (
        "graphs-rehearsed",
        {"card": "910b", "tiers": {"fp16": {"graphs": True, "batching": {"buckets": "auto"}}}},
        "models[0].tiers.fp16.graphs",
        "a CPU has no graphs",
    ),
    ("hash-alone", {"sha256": "0" * 64}, "models[0].sha256", "no weights file"),
    ("inputs-alone", {"inputs": [TENSOR]}, "models[0]", "declared together"),
    ("outputs-alone", {"outputs": [TENSOR]}, "models[0]", "declared together"),
    (
        "input-twice",
        {"inputs": [TENSOR, TENSOR], "outputs": [TENSOR]},
        "models[0].inputs[1].name",
        "declared twice",
    ),
    (
        "output-twice",
        {"inputs": [TENSOR], "outputs": [TENSOR, TENSOR]},
        "models[0].outputs[1].name",
        "declared twice",
    ),
]


@pytest.mark.parametrize(
    ("fields", "path", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_contradiction_names_its_field(fields: dict[str, Any], path: str, words: str) -> None:
    """With the nearest valid name where there is one."""
    error = refused(fields)
    assert error.path == path
    assert words in str(error)


def test_two_models_have_two_names() -> None:
    """They are told apart by URL."""
    error = refused({}, {"name": "n"}, {})
    assert error.path == "models[2].name"
    assert "already models[0]" in str(error)


def test_a_class_may_be_the_default_and_may_share_a_tier() -> None:
    """Nothing is wrong with these."""
    parse_config(yaml.safe_dump({"models": [model(classes={"a": "fp16", "b": "fp16"}, default="a")]}))
    parse_config(yaml.safe_dump({"models": [model(default="fp16")]}))


def test_an_input_and_an_output_may_share_a_name() -> None:
    """They stand in different lists of the protocol."""
    parse_config(yaml.safe_dump({"models": [model(inputs=[TENSOR], outputs=[TENSOR])]}))


def test_the_checks_change_nothing() -> None:
    """They only look."""
    config = Config.model_validate({"models": [model()]})
    before = config.model_dump()
    check_config(config)
    assert config.model_dump() == before


def test_nearest_suggests_or_lists() -> None:
    """One near name, else all of them, else nothing."""
    assert nearest("prot", ["port", "host"]) == "; did you mean 'port'?"
    assert nearest("zzzz", ["port", "host"]) == "; one of host, port"
    assert nearest("x", []) == ""


def test_keys_without_effect_are_named_only_where_they_are_set() -> None:
    """The contract's keys are read; what does nothing yet says so."""
    assert ineffective(Config.model_validate({"models": [model()]})) == []
    notes = ineffective(
        Config.model_validate(
            {"server": {"grpc_port": 1}, "models": [model(), model(name="n", guard={}, divergence={})]}
        )
    )
    assert [note.partition(":")[0] for note in notes] == [
        "server.grpc_port",
    ]
