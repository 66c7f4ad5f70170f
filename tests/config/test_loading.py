"""Reading a configuration: paths of wrong fields, files, and YAML that means harm."""

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serving.config import Config, load_config, parse_config
from serving.config.loading import MAX_CONFIG_BYTES
from serving.errors import ConfigError

MINIMAL = "models: [{name: m, source: 'a:b', tiers: {fp32: {}}}]"


def refused(text: str) -> ConfigError:
    """Why this text is refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    return caught.value


def model(extra: str = "", tier: str = "{}") -> str:
    """A model with one more line, and a tier."""
    return f"models:\n- name: m\n  source: a:b\n  tiers: {{fp32: {tier}}}\n  {extra}\n"


def test_a_minimal_configuration_is_enough() -> None:
    """A name, a source, a tier."""
    config = parse_config(MINIMAL)
    assert config.server.port == 8000
    assert list(config.models[0].tiers) == ["fp32"]


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("sever: {}\n" + MINIMAL, "sever", "did you mean 'server'?"),
        ("server: {prot: 1}\n" + MINIMAL, "server.prot", "did you mean 'port'?"),
        (model("clases: {}"), "models[0].clases", "did you mean 'classes'?"),
        (model(tier="{replica: 2}"), "models[0].tiers.fp32.replica", "did you mean 'replicas'?"),
        (model(tier="{batching: {maxrows: 2}}"), "models[0].tiers.fp32.batching.maxrows", "'max_rows'"),
        (model("classes: {c: {teir: fp32}}"), "models[0].classes.c.teir", "did you mean 'tier'?"),
        (model("guard: {moed: off}"), "models[0].guard.moed", "did you mean 'mode'?"),
        (model("divergence: {budgt: 1}"), "models[0].divergence.budgt", "did you mean 'budget'?"),
        (
            model("inputs: [{name: x, dtype: FP32, shape: [-1], knd: 1}]"),
            "models[0].inputs[0].knd",
            "one of allow_nonfinite, dtype, name, shape",
        ),
        (
            model("outputs: [{name: x, dtype: FP32, shape: [-1], knid: 1}]"),
            "models[0].outputs[0].knid",
            "did you mean 'kind'?",
        ),
        (MINIMAL.replace("source", "sorce"), "models[0].sorce", "did you mean 'source'?"),
        (model(tier="{zzzzzz: 1}"), "models[0].tiers.fp32.zzzzzz", "one of accept_degraded, batching"),
    ],
)
def test_an_unknown_key_is_refused_at_each_depth(text: str, path: str, words: str) -> None:
    """With its path and the nearest name."""
    error = refused(text)
    assert error.path == path
    assert "unknown key" in str(error)
    assert words in str(error)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("server: {}", "models", "is missing"),
        ("models: []", "models", "at least 1"),
        ("models: [{source: 'a:b'}]", "models[0].name", "is missing"),
        ("models: [{name: m, source: 'a:b', tiers: {}}]", "models[0].tiers", "at least 1"),
        ("models: [3]", "models[0]", "dictionary"),
        ("server: {port: 0}\n" + MINIMAL, "server.port", "greater than or equal to 1"),
        ("server: {port: '80'}\n" + MINIMAL, "server.port", "integer"),
        ("server: {port: true}\n" + MINIMAL, "server.port", "integer"),
        ("server: {host: 0.0.0.0}\n" + MINIMAL, "server", "beyond loopback"),
        (model("device: gpu"), "models[0].device", "'gpu' is not valid; did you mean 'npu'?"),
        (model("guard: {mode: deeep}"), "models[0].guard.mode", "did you mean 'deep'?"),
        (model(tier="{kind: fp61}"), "models[0].tiers.fp32.kind", "did you mean 'fp16'?"),
        (MINIMAL.replace("name: m", "name: M/.."), "models[0].name", "'M/..': a name has lower-case"),
        (MINIMAL.replace("fp32", "FP32"), "models[0].tiers.FP32", "a name has lower-case"),
        (MINIMAL.replace("a:b", "a.b"), "models[0].source", "package.module:callable"),
        (
            model("inputs: [{name: x, dtype: float32, shape: [-1]}]"),
            "models[0].inputs[0].dtype",
            "unknown dtype 'float32'; one of BOOL",
        ),
        (model("inputs: [{name: x, dtype: FP32, shape: [2]}]"), "models[0].inputs[0].shape", "written -1"),
        (model("classes: {c: 3}"), "models[0].classes.c", "dictionary"),
        (model("sha256: ABC"), "models[0].sha256", "does not match"),
    ],
)
def test_a_wrong_value_names_its_field(text: str, path: str, words: str) -> None:
    """And says what would be right."""
    error = refused(text)
    assert error.path == path
    assert words in str(error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server: {}\nserver: {}\n" + MINIMAL, "line 2: 'server' stands twice"),
        (model("device: cpu\n  device: cpu"), "line 6: 'device' stands twice"),
        ("1: x", "the key '1' is not text"),
        ("? [a]\n: x", "is not text"),
        ("null: x", "is not text"),
    ],
)
def test_keys_are_text_and_stand_once(text: str, words: str) -> None:
    """YAML's loader would keep the last one in silence."""
    assert words in str(refused(text))


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    """Not where the command was typed; absolute ones stay."""
    file = tmp_path / "deployment.yaml"
    server = "server: {tokens_file: tokens, tls_certificate: tls/server.pem, tls_key: /server.key}\n"
    file.write_text(server + model("weights: sub/w.safetensors"))
    config = load_config(file)
    assert config.server.tokens_file == tmp_path / "tokens"
    assert config.server.tls_certificate == tmp_path / "tls/server.pem"
    assert config.server.tls_key == Path("/server.key")
    assert config.models[0].weights == tmp_path / "sub/w.safetensors"
    file.write_text(model("weights: /w.safetensors"))
    assert load_config(file).models[0].weights == Path("/w.safetensors")
    for folder, found in (("captures", tmp_path / "captures"), ("/c", Path("/c"))):
        file.write_text(model(f"divergence: {{capture: {{folder: {folder}}}}}"))
        divergence = load_config(file).models[0].divergence
        assert divergence.capture is not None
        assert divergence.capture.folder == found


@pytest.mark.parametrize("file", sorted(Path("deployments").absolute().glob("*.yaml")), ids=lambda f: f.name)
def test_the_deployments_are_valid(file: Path) -> None:
    """What `make serve` starts."""
    assert load_config(file).models


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The path and the reason."""
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.yaml: No such file"):
        load_config(tmp_path / "gone.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """Nor is it a traceback."""
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    """Said as such."""
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"# caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(file)


def test_a_huge_file_is_not_parsed(tmp_path: Path) -> None:
    """Its size is enough to refuse it; one byte less is read."""
    file = tmp_path / "huge.yaml"
    padding = MAX_CONFIG_BYTES - len(MINIMAL) - 2
    file.write_text(MINIMAL + "\n#" + "x" * padding)
    assert load_config(file).models
    file.write_text(MINIMAL + "\n#" + "x" * (padding + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_config(file)


def test_an_endless_file_is_not_read_to_its_end() -> None:
    """A device says that its size is 0."""
    with pytest.raises(ConfigError, match="larger than"):
        load_config(Path("/dev/zero"))


def laughs(levels: int, field: str) -> str:
    """Ten aliases of ten aliases of … in a field."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return model(f"{field}: *a{levels - 1}").replace("models:", "\n".join([*lines, "models:"]))


@pytest.mark.parametrize("field", ["device", "default", "sha256", "classes", "guard"])
def test_a_billion_laughs_are_not_written_out(field: str) -> None:
    """Neither in memory nor in the message."""
    started_s = time.monotonic()
    error = refused(laughs(10, field))
    assert "aliases expanded" in str(error)
    assert len(str(error)) < 200
    assert time.monotonic() - started_s < 2


def test_many_aliases_of_something_large_are_refused() -> None:
    """No depth is needed to make much of little."""
    tiers = ", ".join(f"t{i}: {{kind: fp16}}" for i in range(1000))
    text = f"models:\n- &m {{name: m, source: 'a:b', tiers: {{{tiers}}}}}\n" + "- *m\n" * 1000
    assert "aliases expanded" in str(refused(text))


def test_an_alias_within_itself_is_refused() -> None:
    """It never ends."""
    assert "aliases expanded" in str(refused("&a {models: *a}"))
    assert "aliases expanded" in str(refused(model("device: &d [*d]")))


def test_an_ordinary_alias_is_welcome() -> None:
    """Two tiers of the same settings."""
    text = "models:\n- name: m\n  source: a:b\n  tiers: {fp32: &t {replicas: 2}, fp16: *t}\n"
    assert [tier.replicas for tier in parse_config(text).models[0].tiers.values()] == [2, 2]


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_refused(opening: str) -> None:
    """Python's stack is no place to find that out."""
    assert "nested too deeply" in str(refused(opening * 2000))


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch owned']",
        "!!python/object:os.system {}",
        "!!python/name:os.system",
        "!!python/module:os",
        "!unknown x",
    ],
)
def test_a_tag_makes_no_object(value: str) -> None:
    """Plain data only."""
    assert "not valid YAML" in str(refused(f"models: {value}"))


@pytest.mark.parametrize(
    "value",
    ["2001-13-01", "0x_", "0b_", "!!bool x", "!!timestamp x", "!!int ''", "!!float x", "9" * 5000],
)
def test_a_value_that_yaml_itself_cannot_make_is_refused_with_its_line(value: str) -> None:
    """PyYAML lets out the ValueError, KeyError or AttributeError of its own code."""
    assert str(refused(f"server: {{}}\nmodels: {value}")).startswith("line 2: not a valid ")


@pytest.mark.parametrize("text", ["a: \0", "a: \x1b[2J", "\ud800", "a: \x7f"])
def test_control_characters_are_no_yaml(text: str) -> None:
    """NUL, escapes, surrogates."""
    assert "not valid YAML" in str(refused(text))


@pytest.mark.parametrize("text", ["", "# nothing", "null", "[]", "text", "3", MINIMAL + "\n---\n" + MINIMAL])
def test_what_is_no_single_mapping_is_refused(text: str) -> None:
    """One document, a mapping."""
    refused(text)


def test_a_syntax_error_names_line_and_column() -> None:
    """In the editor's counting."""
    assert "line 2, column 1" in str(refused("models: [\n"))


@given(st.text(st.characters(codec=None), max_size=200))
def test_any_text_is_a_configuration_or_a_config_error(text: str) -> None:
    """Nothing else is ever raised."""
    with contextlib.suppress(ConfigError):
        parse_config(text)


NAMES = st.sampled_from([*Config.model_fields, "fp32", "name", "source", "tiers", "classes", "inputs", "x"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.dates(),
    st.binary(max_size=4),
    st.sampled_from(["fp32", "a:b", "m", "auto"]),
    st.text(max_size=8),
)
DATA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(NAMES, SCALARS), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, DATA, max_size=3))
def test_any_data_is_a_configuration_or_a_config_error(data: dict[Any, Any]) -> None:
    """Whatever stands under the known names."""
    with contextlib.suppress(ConfigError):
        parse_config(yaml.safe_dump(data))


@given(
    st.fixed_dictionaries(
        {"name": st.just("m"), "source": st.just("a:b"), "tiers": st.one_of(st.just({"fp32": {}}), DATA)},
        optional=dict.fromkeys(("classes", "default", "inputs", "outputs", "guard", "weights"), DATA),
    )
)
def test_any_data_in_a_models_fields_is_a_configuration_or_a_config_error(data: dict[str, Any]) -> None:
    """Deeper than the first field that is missing; the field or the line is named."""
    path = "models[0]"
    try:
        parse_config(yaml.safe_dump({"models": [data]}))
    except ConfigError as error:
        path = error.path or str(error)
    assert path.startswith(("models[0]", "line "))
