"""Whole inference requests and replies, by hand, at random, and as Triton's client makes them."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from serving.errors import (
    BadHeader,
    BadJson,
    BadShape,
    BadTensor,
    BadType,
    InternalError,
    NonfiniteInput,
    RequestError,
    TooLarge,
)
from serving.protocol.oip import InferRequest, OutputRequest, decode_infer, encode_infer
from serving.tensors import DTYPES, Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(TensorSpec("x", "FP32", (-1, 2)), TensorSpec("n", "INT64", (-1,))),
    outputs=(TensorSpec("y", "FP32", (-1, 2)), TensorSpec("z", "INT64", (-1,))),
)
ONE = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))
X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
N: dict[str, Any] = {"name": "n", "datatype": "INT64", "shape": [2], "data": [5, 6]}


def binary(tensor: dict[str, Any], size: Any) -> dict[str, Any]:
    """The same tensor, its data in the tail."""
    return {**{k: v for k, v in tensor.items() if k != "data"}, "parameters": {"binary_data_size": size}}


def decode(
    *inputs: dict[str, Any], signature: Signature = SIGNATURE, tail: bytes | None = None, **fields: Any
) -> InferRequest:
    """Decode a request made of these parts."""
    text = json.dumps({"inputs": inputs, **fields}).encode()
    return decode_infer(text + (tail or b""), None if tail is None else len(text), signature)


def test_a_json_request() -> None:
    """Inputs come in the signature's order; all outputs are wanted, in JSON."""
    request = decode(N, X, id="r", parameters={"precision": "fp32"})
    assert list(request.inputs) == ["x", "n"]
    assert request.inputs["x"].tolist() == [[1, 2], [3, 4]]
    assert request.inputs["n"].tolist() == [5, 6]
    assert (request.id, request.rows, request.parameters) == ("r", 2, {"precision": "fp32"})
    assert request.outputs == (OutputRequest("y", False), OutputRequest("z", False))


def test_a_binary_request() -> None:
    """The tail follows the request's order; JSON and binary may be mixed."""
    x, n = np.array([[1, 2], [3, 4]], "<f4"), np.array([5, 6], "<i8")
    request = decode(binary(N, 16), binary(X, 16), tail=n.tobytes() + x.tobytes())
    assert np.array_equal(request.inputs["x"], x)
    assert np.array_equal(request.inputs["n"], n)
    mixed = decode(X, binary(N, 16), tail=n.tobytes())
    assert np.array_equal(mixed.inputs["n"], n)


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ([], BadTensor),
        ([X], BadTensor),
        ([X, X], BadTensor),
        ([X, N, N], BadTensor),
        ([X, N, {**N, "name": "other"}], BadTensor),
        ([{**X, "datatype": "FP64"}, N], BadType),
        ([{**X, "datatype": "INT32"}, N], BadType),
        ([{**X, "datatype": ""}, N], BadType),
        ([{**X, "shape": []}, N], BadShape),
        ([{**X, "shape": [4]}, N], BadShape),
        ([{**X, "shape": [1, 4]}, N], BadShape),
        ([{**X, "shape": [2, 2, 1]}, N], BadShape),
        ([{**X, "shape": [-1, 2]}, N], BadShape),
        ([{**X, "shape": [-2, -2]}, N], BadShape),
        ([{**X, "shape": [1] * 17}, N], BadShape),
        ([{**X, "shape": [2**62, 2]}, N], BadShape),
        ([{**X, "shape": [10**4000, 2]}, N], BadShape),
        ([{**X, "shape": [3, 2]}, N], BadShape),
        ([X, {**N, "shape": [1], "data": [1]}], BadShape),
        ([{**X, "shape": [0, 2], "data": []}, {**N, "shape": [0], "data": []}], BadShape),
        ([{**X, "data": [1, 2, 3, 1e39]}, N], NonfiniteInput),
        ([{**X, "data": [1, 2, 3, True]}, N], BadType),
        ([{k: v for k, v in X.items() if k != "data"}, N], BadTensor),
        ([{**X, "parameters": {"binary_data_size": 16}}, N], BadTensor),
        ([binary(X, 16), N], BadShape),
        ([{**binary(X, 16), "parameters": {"shared_memory_region": "r"}}, N], BadTensor),
    ],
)
def test_inputs_that_are_refused(inputs: list[dict[str, Any]], error: Any) -> None:
    """One case for each rule."""
    with pytest.raises(error):
        decode(*inputs)


@pytest.mark.parametrize("json_length", [-1, 10**30, 10**4000])
def test_json_length_out_of_range(json_length: Any) -> None:
    """Absurd lengths never slice the body."""
    with pytest.raises(BadHeader):
        decode_infer(b"{}", json_length, SIGNATURE)


def test_json_length_that_cuts() -> None:
    """Too short cuts the JSON, too long takes some of the tail."""
    text = json.dumps({"inputs": [binary(X, 16)]}).encode()
    body = text + bytes(16)
    assert decode_infer(body, len(text), ONE).rows == 2
    for json_length in (0, len(text) - 1, len(text) + 1, len(body)):
        with pytest.raises(BadJson):
            decode_infer(body, json_length, ONE)
    with pytest.raises(BadJson):
        decode_infer(body, None, ONE)


def test_a_tail_that_no_input_claims() -> None:
    """Unused bytes are a mistake of the client's."""
    with pytest.raises(BadHeader):
        decode(X, N, tail=b"x")


@pytest.mark.parametrize("request_id", ["", "a" * 128, "A-1 ~"])
def test_ids(request_id: Any) -> None:
    """Printable ASCII, not too long."""
    assert decode(X, N, id=request_id).id == request_id


@pytest.mark.parametrize("request_id", ["a" * 129, "\n", "é", "\x7f", 7])
def test_ids_that_are_refused(request_id: Any) -> None:
    """They go to logs and headers."""
    with pytest.raises(BadHeader):
        decode(X, N, id=request_id)


def test_null_stands_for_absent() -> None:
    """As typed clients send it."""
    request = decode(X, N, id=None, parameters=None, outputs=None)
    assert (request.id, request.parameters, len(request.outputs)) == (None, {}, 2)


def test_requested_outputs() -> None:
    """Only those, in the request's order, each in its own form."""
    request = decode(
        X,
        N,
        outputs=[{"name": "z", "parameters": {"binary_data": False}}, {"name": "y"}],
        parameters={"binary_data_output": True},
    )
    assert request.outputs == (OutputRequest("z", False), OutputRequest("y", True))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"outputs": [{"name": "w"}]}, BadTensor),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, BadTensor),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, BadHeader),
        ({"outputs": [{"name": "y", "parameters": {"classification": 3}}]}, BadTensor),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, BadTensor),
        ({"parameters": {"binary_data_output": "yes"}}, BadHeader),
        ({"parameters": {"p": [1]}}, BadJson),
    ],
)
def test_outputs_that_are_refused(fields: dict[str, Any], error: Any) -> None:
    """Before the model runs."""
    with pytest.raises(error):
        decode(X, N, **fields)


def test_fp16_outputs_are_binary_only() -> None:
    """Told before the model runs, not after."""
    signature = Signature(ONE.inputs, (TensorSpec("y", "FP16", (-1, 2)),))
    with pytest.raises(BadType, match="binary"):
        decode(X, signature=signature)
    assert decode(X, signature=signature, parameters={"binary_data_output": True}).outputs[0].binary


def test_empty_dimensions() -> None:
    """A free dimension may be zero, but not hide an absurd one."""
    signature = Signature((TensorSpec("x", "FP32", (-1, -1, -1)),), ONE.outputs)
    empty = {**X, "shape": [1, 0, 3], "data": []}
    assert decode(empty, signature=signature).inputs["x"].shape == (1, 0, 3)
    for size in (2**61, 2**62, 2**63 - 1, 10**4000):
        with pytest.raises(BadShape):
            decode({**empty, "shape": [1, 0, size]}, signature=signature)


def test_max_rows() -> None:
    """Checked before the elements are looked at."""
    text = json.dumps({"inputs": [{**X, "data": "not even data"}]}).encode()
    with pytest.raises(TooLarge):
        decode_infer(text, None, ONE, max_rows=1)
    assert decode_infer(json.dumps({"inputs": [X]}).encode(), None, ONE, max_rows=2).rows == 2


def test_nonfinite_where_allowed() -> None:
    """The operator's choice for an input, in binary only."""
    tail = np.array([np.nan] * 4, "<f4").tobytes()
    text = json.dumps({"inputs": [binary(X, 16)]}).encode()
    with pytest.raises(NonfiniteInput):
        decode_infer(text + tail, len(text), ONE)
    request = decode_infer(text + tail, len(text), ONE, allow_nonfinite={"x"})
    assert np.isnan(request.inputs["x"]).all()


OUTPUTS = {"y": np.array([[0.1, 2], [3, 4]], "<f4"), "z": np.array([5, 6], "<i8")}


def wanted(*outputs: OutputRequest, request_id: str | None = None) -> InferRequest:
    """A request for these outputs."""
    return InferRequest(request_id, {}, 2, {}, outputs)


def test_a_json_reply() -> None:
    """Floats have the digits of their own precision."""
    headers, body = encode_infer("m", "1", wanted(OutputRequest("y"), request_id="r"), OUTPUTS, {"p": 1.5})
    assert headers == [("content-type", "application/json")]
    assert b"[0.1,2.0,3.0,4.0]" in body
    assert json.loads(body) == {
        "model_name": "m",
        "model_version": "1",
        "id": "r",
        "parameters": {"p": 1.5},
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [0.1, 2, 3, 4]}],
    }


def test_a_binary_reply() -> None:
    """The tail follows the outputs' order, those in JSON left out."""
    request = wanted(OutputRequest("z", True), OutputRequest("y", True))
    headers, body = encode_infer("m", "1", request, OUTPUTS, {})
    length = int(dict(headers)["inference-header-content-length"])
    assert dict(headers)["content-type"] == "application/octet-stream"
    assert body[length:] == OUTPUTS["z"].tobytes() + OUTPUTS["y"].tobytes()
    reply = json.loads(body[:length])
    assert [output["parameters"] for output in reply["outputs"]] == [{"binary_data_size": 16}] * 2
    assert "id" not in reply
    assert "parameters" not in reply


def test_replies_that_are_our_fault() -> None:
    """An absent output, a dtype without a name, a number that JSON lacks."""
    for outputs in ({}, {"y": np.zeros((2, 2), "c8")}, {"y": np.full((2, 2), np.nan, "<f4")}):
        with pytest.raises(InternalError):
            encode_infer("m", "1", wanted(OutputRequest("y")), outputs, {})


def test_foreign_byte_order() -> None:
    """The wire is little-endian."""
    array = np.array([1, 2], ">i4")
    _, body = encode_infer("m", "1", wanted(OutputRequest("y", True)), {"y": array}, {})
    assert body.endswith(b"\1\0\0\0\2\0\0\0")
    _, body = encode_infer("m", "1", wanted(OutputRequest("y")), {"y": array}, {})
    assert json.loads(body)["outputs"][0]["data"] == [1, 2]


def elements(dtype: str, *, text: bool) -> st.SearchStrategy[Any]:
    """What a tensor of that dtype may hold."""
    if dtype == "BYTES":
        return st.text(max_size=5).map(str.encode) if text else st.binary(max_size=5)
    plain = DTYPES[dtype]
    if plain.kind == "f":
        return st_numpy.from_dtype(plain, allow_nan=False, allow_infinity=False)
    return st_numpy.from_dtype(plain)


@st.composite
def tensors(draw: st.DrawFn, *, text: bool) -> tuple[str, np.ndarray]:
    """A dtype and an array of it."""
    dtype = draw(st.sampled_from([name for name in DTYPES if not (text and name == "FP16")]))
    shape = draw(st_numpy.array_shapes(max_dims=4, max_side=3))
    filled = np.empty(shape, DTYPES[dtype])
    flat = draw(st.lists(elements(dtype, text=text), min_size=filled.size, max_size=filled.size))
    filled.ravel()[:] = flat
    return dtype, filled


def signature_of(dtype: str, array: np.ndarray) -> Signature:
    """A model that takes and gives such an array."""
    shape = (-1, *array.shape[1:])
    return Signature((TensorSpec("x", dtype, shape),), (TensorSpec("y", dtype, shape),))


@given(tensor=tensors(text=True), nested=st.booleans())
def test_json_round_trip(tensor: Any, nested: bool) -> None:
    """Every dtype, flat and nested, comes back bit by bit, in and out."""
    dtype, array = tensor
    values = array.tolist() if nested else array.ravel().tolist()
    text = json.dumps(values, default=bytes.decode)
    head = json.dumps({"name": "x", "datatype": dtype, "shape": array.shape})
    body = f'{{"inputs":[{head[:-1]},"data":{text}}}]}}'.encode()
    request = decode_infer(body, None, signature_of(dtype, array))
    assert np.array_equal(request.inputs["x"], array)
    assert request.inputs["x"].dtype == array.dtype

    _, reply = encode_infer("m", "1", request, {"y": array}, {})
    output = json.loads(reply)["outputs"][0] | {"name": "x"}
    again = decode_infer(json.dumps({"inputs": [output]}).encode(), None, signature_of(dtype, array))
    assert np.array_equal(again.inputs["x"], array)


@given(tensor=tensors(text=False))
def test_binary_round_trip(tensor: Any) -> None:
    """Every dtype comes back bit by bit."""
    dtype, array = tensor
    headers, body = encode_infer("m", "1", wanted(OutputRequest("y", True)), {"y": array}, {})
    length = int(dict(headers)["inference-header-content-length"])
    output = json.loads(body[:length])["outputs"][0] | {"name": "x"}
    text = json.dumps({"inputs": [output], "parameters": {"binary_data_output": True}}).encode()
    request = decode_infer(text + body[length:], len(text), signature_of(dtype, array))
    assert np.array_equal(request.inputs["x"], array)


def decode_or_refuse(body: bytes, json_length: int | None, signature: Signature) -> None:
    """Anything but a client's error with a short message is a fault."""
    refusal: RequestError | None = None
    try:
        decode_infer(body, json_length, signature)
    except RequestError as error:
        refusal = error
    assert refusal is None or (refusal.status == 400 and len(str(refusal)) < 500)


@given(body=st.binary(max_size=200), json_length=st.none() | st.integers(-2, 300))
@example(body=b'{"inputs":[]}', json_length=None)
def test_arbitrary_bytes(body: bytes, json_length: Any) -> None:
    """Only ever a `RequestError`."""
    decode_or_refuse(body, json_length, SIGNATURE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=6,
)


@given(
    tensor=st.fixed_dictionaries(
        {},
        optional={
            "name": st.just("x") | json_values,
            "datatype": st.sampled_from(list(DTYPES)) | json_values,
            "shape": st.lists(st.integers(-1, 3) | st.integers(), max_size=4) | json_values,
            "data": st.lists(st.integers() | st.floats() | json_values, max_size=6) | json_values,
            "parameters": st.dictionaries(st.just("binary_data_size"), st.integers(-1, 20) | json_values)
            | json_values,
        },
    ),
    dtype=st.sampled_from(list(DTYPES)),
    shape=st.lists(st.integers(-1, 3), max_size=3),
    tail=st.binary(max_size=20),
)
def test_arbitrary_tensors(tensor: Any, dtype: str, shape: Any, tail: bytes) -> None:
    """Fields of any type and value, against any signature."""
    text = json.dumps({"inputs": [tensor]}).encode()
    signature = Signature((TensorSpec("x", dtype, (-1, *shape)),), ONE.outputs)
    decode_or_refuse(text + tail, len(text), signature)
    decode_or_refuse(text, None, signature)


VALID = json.dumps(
    {"id": "a", "inputs": [X, binary(N, 16)], "outputs": [{"name": "y"}], "parameters": {"p": "q"}}
).encode()


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(VALID) + 16),
            st.integers(0, 4),
            st.binary(max_size=3)
            | st.sampled_from(
                [b"[", b"]", b'"', b"\\", b"NaN", b"1e999", b"-", b"null", b"\xff", b"\\ud800", b","]
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    json_length=st.just(len(VALID)) | st.none() | st.integers(0, len(VALID) + 20),
)
def test_mutations_of_a_valid_body(edits: list[tuple[int, int, bytes]], json_length: Any) -> None:
    """Bytes replaced, inserted and removed anywhere."""
    body = VALID + np.array([5, 6], "<i8").tobytes()
    for start, length, text in edits:
        body = body[:start] + text + body[start + length :]
    decode_or_refuse(body, json_length, SIGNATURE)
