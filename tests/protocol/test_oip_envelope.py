"""The JSON part of a request: form, depth, numbers that are none, strings that are none."""

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import (
    BadHeader,
    BadJson,
    BadShape,
    BadTensor,
    BadType,
    NonfiniteInput,
    TooDeep,
    TooLarge,
)
from serving.protocol.oip_envelope import (
    MAX_NESTING,
    decode_envelope,
    decode_parameters,
    is_too_deep,
)

TENSOR = '{"name":"x","datatype":"FP32","shape":[1,2],"data":[1,2]}'


def body(**fields: str) -> bytes:
    """A request of JSON fragments."""
    fields = {"inputs": f"[{TENSOR}]", **fields}
    return ("{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}").encode()


def test_a_plain_request() -> None:
    """Data stays unparsed; absent parts have defaults; unknown fields are ignored."""
    envelope = decode_envelope(body(id='"7"', model_name='"m"'))
    assert envelope.id == "7"
    assert envelope.inputs[0].shape == [1, 2]
    assert bytes(envelope.inputs[0].data) == b"[1,2]"
    assert envelope.outputs is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        body()[:-1],
        body() + b"x",
        body() + body(),
        body(extra="01"),
        body(extra="[1,]"),
        body(extra='"\x01"'),
        body(extra='"\\q"'),
        body(outputs="{}"),
        body(outputs="[1]"),
        b"\xef\xbb\xbf" + body(),
        body().replace(b"FP32", b"\xff"),
        body(extra='"?"').replace(b"?", b"\xff"),
        body(extra='"?"').replace(b"?", b"\xed\xa0\x80"),
        body(extra=r'"\ud800"'),
        body(extra=r'"\ud800\u0041"'),
        body(extra=r'"\udc00"'),
        body(extra=r'{"\udc00":1}'),
        body(id=r'"\ud83dx"'),
        body().decode().encode("utf-16"),
    ],
)
def test_bad_json(text: Any) -> None:
    """Malformed, truncated, trailing, not UTF-8, lone surrogates, also in ignored fields."""
    with pytest.raises(BadJson):
        decode_envelope(text)


@pytest.mark.parametrize("literal", ["NaN", "-NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"])
@pytest.mark.parametrize("place", ["data", "parameters", "extra"])
def test_nonfinite_literals_are_named(literal: str, place: str) -> None:
    """Python's json writes them; the client is told what is wrong."""
    text = {
        "data": body(inputs=f"[{TENSOR.replace('[1,2]}', f'[1,{literal}]}}')}]"),
        "parameters": body(parameters=f'{{"p":{literal}}}'),
        "extra": body(extra=f"[[{literal}]]"),
    }[place]
    with pytest.raises(NonfiniteInput):
        decode_envelope(text)


def test_words_within_strings_are_no_literals() -> None:
    """A string may speak of NaN."""
    assert decode_envelope(body(id='"NaN"')).id == "NaN"


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        ('{"datatype":"FP32","shape":[1]}', BadTensor),
        ('{"name":1,"datatype":"FP32","shape":[1]}', BadTensor),
        ('{"name":"x","shape":[1]}', BadType),
        ('{"name":"x","datatype":3,"shape":[1]}', BadType),
        ('{"name":"x","datatype":"FP32"}', BadShape),
        ('{"name":"x","datatype":"FP32","shape":3}', BadShape),
        ('{"name":"x","datatype":"FP32","shape":[1.0]}', BadShape),
        ('{"name":"x","datatype":"FP32","shape":[true]}', BadShape),
        ('{"name":"x","datatype":"FP32","shape":["1"]}', BadShape),
        ('{"name":"x","datatype":"FP32","shape":[null]}', BadShape),
        ('{"name":"x","datatype":"FP32","shape":[' + "9" * 5000 + "]}", BadShape),
        ('{"name":"x","datatype":"FP32","shape":[1],"parameters":[]}', BadJson),
        ('{"name":"x","datatype":"FP32","shape":[1],"parameters":{"a":[]}}', BadJson),
        ('{"name":"x","datatype":"FP32","shape":[1],"parameters":{"a":1e999}}', NonfiniteInput),
        ("1", BadTensor),
    ],
)
def test_a_field_of_the_wrong_form(tensor: Any, error: Any) -> None:
    """Each field has its own error."""
    with pytest.raises(error):
        decode_envelope(body(inputs=f"[{tensor}]"))


def test_the_id_and_inputs_have_their_own_errors() -> None:
    """A number is no id; a request has inputs."""
    with pytest.raises(BadHeader):
        decode_envelope(body(id="7"))
    with pytest.raises(BadTensor):
        decode_envelope(b"{}")
    with pytest.raises(BadTensor):
        decode_envelope(b'{"inputs":null}')


@pytest.mark.parametrize("brackets", ["[]", "{}"])
@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 100_000])
def test_too_deep(brackets: str, depth: int) -> None:
    """Refused before the parser recurses."""
    opening = "[" if brackets == "[]" else '{"a":'
    text = opening * depth + "1" + brackets[1] * depth
    with pytest.raises(TooDeep):
        decode_envelope(body(extra=text))
    with pytest.raises(TooDeep):
        decode_envelope(opening.encode() * depth)


def test_deep_enough() -> None:
    """A hundred levels are read, the request's own included."""
    depth = MAX_NESTING - 1
    assert decode_envelope(body(extra="[" * depth + "]" * depth))


def test_brackets_in_strings_do_not_nest() -> None:
    """Also behind quotes and backslashes that are escaped."""
    for text in ("[" * 200, '\\"' + "[" * 200, "\\\\", '\\\\\\"' + "{" * 200, "]" * 200):
        assert not is_too_deep(f'["{text}","{"[" * 200}"]'.encode())
    assert is_too_deep(b'["' + b"\\\\" + b'",' + b"[" * 200)


def test_many_siblings_are_not_deep() -> None:
    """Width is no depth."""
    assert not is_too_deep(b"[" + b",".join([b"[1]"] * 10_000) + b"]")


def test_depth_is_found_across_the_scans_pieces() -> None:
    """The scan carries depth and open strings from one piece to the next."""
    wide = b"[]," * 600_000
    assert is_too_deep(b"[" + wide + b"[" * 101)
    assert not is_too_deep(b'["' + wide + b"[" * 101 + b'"]')


def test_the_depth_of_a_large_body_is_found_in_linear_time() -> None:
    """16 MB of any bracket, quote or backslash cost well under a second each."""
    for unit in (b"[]", b'"', b"\\", b'\\"', b'"",', b"[", b"]"):
        start = time.perf_counter()
        is_too_deep(b"[" * 101 + b"]" * 101 + unit * (16_000_000 // len(unit)))
        assert time.perf_counter() - start < 5


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\a'),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text('[]"\\'), children, max_size=3),
)


def depth_of(value: object) -> int:
    """Levels of nesting, by recursion."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@given(value=json_values, extra=st.integers(90, 110))
def test_depth_agrees_with_recursion(value: Any, extra: int) -> None:
    """For any document, whatever its strings hold."""
    for _ in range(extra):
        value = [value, "[" * 101]
    assert is_too_deep(json.dumps(value).encode()) == (depth_of(value) > MAX_NESTING)


def test_parameters() -> None:
    """Any JSON scalar, null and absent included."""
    text = b'{"a":1,"b":"x\\"","c":true,"d":null,"e":1.5}'
    parameters = decode_parameters(msgspec.Raw(text))
    assert parameters == {"a": 1, "b": 'x"', "c": True, "d": None, "e": 1.5}
    assert decode_parameters(msgspec.UNSET) == {}
    assert decode_parameters(msgspec.Raw(b"null")) == {}


@pytest.mark.parametrize(
    "text", [b"[]", b"1", b'{"a":[1]}', b'{"a":{}}', b'{"a":1,"a":2}', rb'{"a":1,"\u0061":"2"}']
)
def test_parameters_that_are_refused(text: Any) -> None:
    """What is no scalar, and names given twice: two readers could see two precisions."""
    with pytest.raises(BadJson):
        decode_parameters(msgspec.Raw(text))


def test_parameters_out_of_range() -> None:
    """Infinity by another name."""
    with pytest.raises(NonfiniteInput):
        decode_parameters(msgspec.Raw(b'{"a":1e999}'))


def test_more_tensors_than_any_model_has_are_refused_before_they_are_parsed() -> None:
    """By their keys; a word in the data that is spelt as a key counts for nothing."""
    tensor = '{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}'
    with pytest.raises(TooLarge, match="more than 1024 tensors"):
        decode_envelope(f'{{"inputs": [{",".join([tensor] * 1025)}]}}'.encode())
    words = ",".join(['"name"'] * 5000)
    text = f'{{"inputs": [{{"name": "t", "datatype": "BYTES", "shape": [5000], "data": [{words}]}}]}}'
    assert decode_envelope(text.encode()).inputs[0].shape == [5000]


def test_parameters_beyond_their_limit_are_refused() -> None:
    """They would become Python objects of many times their size."""
    many = ",".join(f'"p{n}": {n}' for n in range(10_000))
    envelope = decode_envelope(f'{{"inputs": [], "parameters": {{{many}}}}}'.encode())
    with pytest.raises(TooLarge, match="parameters are larger"):
        decode_parameters(envelope.parameters)
