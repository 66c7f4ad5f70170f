"""The configuration's types: the contract's example, defaults, bounds, and what is frozen."""

import ipaddress
import json
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.config import Batching, Config, ServerConfig, TierConfig, parse_config
from serving.config.schema import ModelConfig, TensorConfig, is_name
from serving.config.section import Section
from serving.errors import ConfigError
from serving.tensors import DTYPES, TensorSpec

#: As the design shows it to operators, but for `weights` and the card's resources.
CONTRACT = """
server: {host: 127.0.0.1, port: 8000, grpc_port: 8001, gateways: 1, max_body_bytes: 67108864,
         tokens_file: null, allow_unauthenticated: false}
models:
  - name: classifier
    source: mypackage.module:build
    device: auto
    card: auto
    inputs:  [{name: x, dtype: FP32, shape: [-1, 128]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 10], kind: logits}]
    tiers:
      fp32: {replicas: 1, resources: {NPU: 1}}
      fp16: {replicas: 1, resources: {NPU: 1}, batching: {max_rows: 32, max_wait_ms: 2}, max_queue_rows: 1024}
      mixed: {keep_fp32: [head]}
    default: standard
    classes: {critical: fp32, standard: fp16, edge: fp16, bulk: {tier: fp16}}
    guard: {mode: output}
    divergence: {sample: 0.05, metric: rel_l2, budget: 5.0e-3, quantile: 0.99, window: 1000}
"""


def config_of(text: str) -> Config:
    """The types alone, without the further checks."""
    return Config.model_validate(yaml.safe_load(text))


def model(**fields: Any) -> ModelConfig:
    """A model with one tier."""
    return ModelConfig.model_validate({"name": "m", "source": "a:b", "tiers": {"fp32": {}}, **fields})


def test_the_contracts_example_is_valid() -> None:
    """Every key that the design promises."""
    config = config_of(CONTRACT)
    (classifier,) = config.models
    assert list(classifier.tiers) == ["fp32", "fp16", "mixed"]
    assert classifier.tiers["fp16"].batching.max_rows == 32
    assert classifier.tiers["mixed"].keep_fp32 == ("head",)
    assert {name: rule.tier for name, rule in classifier.classes.items()} == {
        "critical": "fp32",
        "standard": "fp16",
        "edge": "fp16",
        "bulk": "fp16",
    }
    signature = classifier.declared_signature()
    assert signature is not None
    assert signature.inputs == (TensorSpec("x", "FP32", (-1, 128)),)
    assert signature.outputs == (TensorSpec("y", "FP32", (-1, 10), "logits"),)


def test_the_contracts_server_section_is_the_default() -> None:
    """What the example writes out is what happens without it."""
    assert config_of(CONTRACT).server == ServerConfig()


def test_the_contracts_guard_and_divergence_are_the_defaults() -> None:
    """The same for the model's sections."""
    (classifier,) = config_of(CONTRACT).models
    assert (classifier.guard, classifier.divergence) == (model().guard, model().divergence)


def test_a_tier_with_nothing_behind_it_has_every_default() -> None:
    """`fp16:` is YAML for null."""
    assert model(tiers={"fp16": None}).tiers == {"fp16": TierConfig()}


def test_a_tiers_kind_is_its_name_unless_it_is_given() -> None:
    """Two tiers of one kind have two names."""
    found = model(tiers={"fp16": {}, "fast": {"kind": "fp16"}})
    assert [found.kind(tier) for tier in found.tiers] == ["fp16", "fp16"]


def test_half_a_signature_is_none() -> None:
    """The checks refuse it; nobody serves it."""
    assert model(inputs=[{"name": "x", "dtype": "FP32", "shape": [-1]}]).declared_signature() is None


def test_a_model_is_found_by_name() -> None:
    """KeyError is not what an unknown name gives by accident."""
    config = config_of(CONTRACT)
    assert config.model("classifier") is config.models[0]


def sections(kind: type[Section] = Section) -> list[type[Section]]:
    """Every section type, subclasses of subclasses too."""
    return [found for child in kind.__subclasses__() for found in (child, *sections(child))]


@pytest.mark.parametrize("section", sections())
def test_every_section_is_frozen_strict_and_closed(section: type[Section]) -> None:
    """Built once, then only read."""
    assert section.model_config["frozen"]
    assert section.model_config["strict"]
    assert section.model_config["extra"] == "forbid"


def test_assigning_is_an_error() -> None:
    """At each depth."""
    config = config_of(CONTRACT)
    for section, field in [(config, "models"), (config.server, "port"), (config.models[0].guard, "mode")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, field, None)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_an_address_beyond_loopback_is_a_deliberate_choice(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    """Without tokens and without saying so it is refused."""
    host = str(address)
    if address.is_loopback:
        assert ServerConfig(host=host).is_loopback
        return
    with pytest.raises(ValidationError, match="beyond loopback"):
        ServerConfig(host=host)
    assert not ServerConfig(host=host, allow_unauthenticated=True).is_loopback
    assert not ServerConfig.model_validate({"host": host, "tokens_file": "tokens"}).is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_tokens(host: str) -> None:
    """Only this machine can call."""
    assert ServerConfig(host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "localhost.evil.example", "127.1", "example.org"])  # noqa: S104
def test_a_host_that_may_be_open_counts_as_open(host: str) -> None:
    """In doubt, refuse."""
    with pytest.raises(ValidationError, match="beyond loopback"):
        ServerConfig(host=host)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_protocol_dtype_can_be_declared(dtype: str) -> None:
    """By its OIP name."""
    tensor = TensorConfig.model_validate({"name": "x", "dtype": dtype, "shape": [-1]})
    assert tensor.spec().dtype == dtype


@pytest.mark.parametrize("shape", [[], [1], [0, 2], [-1, 0], [-1, -2], [-1] * 17, [-1, True], [-1, "3"]])
def test_a_shape_starts_with_the_rows(shape: list[Any]) -> None:
    """-1 first, then -1 or at least 1, whole numbers."""
    with pytest.raises(ValidationError):
        TensorConfig.model_validate({"name": "x", "dtype": "FP32", "shape": shape})


@pytest.mark.parametrize("amount", [0, -1, float("nan"), "1", True])
def test_a_resource_is_an_amount_above_zero(amount: Any) -> None:
    """Anything else would make Ray wait for ever or fail late."""
    with pytest.raises(ValidationError):
        TierConfig.model_validate({"resources": {"NPU": amount}})


@given(st.integers(1, 65536))
def test_auto_buckets_are_powers_of_two_up_to_max_rows(max_rows: int) -> None:
    """And max_rows itself, so that every batch has one."""
    rows = Batching(max_rows=max_rows, buckets="auto").bucket_rows
    assert rows[-1] == max_rows
    assert list(rows) == sorted(set(rows))
    assert all(count & (count - 1) == 0 for count in rows[:-1])
    assert all(later <= 2 * count for count, later in pairwise(rows))


def test_buckets_are_none_unless_asked_for() -> None:
    """Batches are computed as they come."""
    assert Batching().bucket_rows == ()
    assert Batching.model_validate({"max_rows": 8, "buckets": [1, 8]}).bucket_rows == (1, 8)


@pytest.mark.parametrize("buckets", [[], [0, 4], [4, 1], [1, 1], [1.0], ["1"], [True], "Auto", 4, True, {}])
def test_buckets_are_ascending_numbers_of_rows_or_auto(buckets: Any) -> None:
    """With an example of both in the message, which names the field."""
    tier = json.dumps({"batching": {"buckets": buckets}})  # JSON is YAML too.
    with pytest.raises(
        ConfigError, match=r"^models\[0\]\.tiers\.fp16\.batching\.buckets: (auto, or|the buckets)"
    ):
        parse_config(f"models: [{{name: m, source: 'a:b', tiers: {{fp16: {tier}}}}}]")


@given(st.text(st.characters(codec=None)))
def test_a_name_is_safe_in_urls_headers_and_labels(text: str) -> None:
    """Whatever passes has none of the characters that mean something there."""
    if is_name(text):
        assert text.isascii()
        assert not set(text) & set(" /:<>=%?#\"'\\\r\n\t,;")
        assert text == text.lower()


@pytest.mark.parametrize("name", ["fp16", "a", "0", "my-model.v2_x", "a" * 63])
def test_ordinary_names_are_names(name: str) -> None:
    """Letters, digits, dots, dashes, underscores."""
    assert is_name(name)


@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "a/b", "..", "rel_l2<=1", "a" * 64, "é", "a\n"])
def test_other_texts_are_no_names(name: str) -> None:
    """They would change a path, a header or a label."""
    assert not is_name(name)
