"""Tensor elements in JSON."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from serving.errors import BadShape, BadType, InternalError, NonfiniteInput
from serving.protocol import oip_json
from serving.protocol.oip_json import decode_elements, encode_elements
from serving.tensors import DTYPES, TensorSpec

JSON_DTYPES = [name for name in DTYPES if name != "FP16"]


def decode(text: str | bytes, dtype: str = "FP32", shape: tuple[int, ...] = (2, 2)) -> np.ndarray:
    """Decode for a signature of the same shape, the rows free."""
    spec = TensorSpec("x", dtype, (-1, *shape[1:]))
    return decode_elements(msgspec.Raw(text if isinstance(text, bytes) else text.encode()), spec, shape)


@pytest.fixture(params=["at once", "in pieces"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case for short arrays and, with a tiny piece size, the way long ones go."""
    if request.param == "in pieces":
        monkeypatch.setattr(oip_json, "_PIECE_BYTES", 2)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", JSON_DTYPES)
@pytest.mark.parametrize("text", ["[1,0,1,1]", "[[1,0],[1,1]]", " [ [ 1 , 0 ] ,\n[ 1,\t1 ] ] "])
def test_flat_or_nested(dtype: str, text: Any) -> None:
    """Both forms, for every dtype that JSON can carry."""
    if dtype in ("BOOL", "BYTES"):
        words = ("false", "true") if dtype == "BOOL" else ('"0"', '"1"')
        text = text.replace("0", "?").replace("1", words[1]).replace("?", words[0])
    array = decode(text, dtype)
    assert array.shape == (2, 2)
    assert array.dtype == DTYPES[dtype]
    expected = [[b"1", b"0"], [b"1", b"1"]] if dtype == "BYTES" else [[1, 0], [1, 1]]
    assert array.tolist() == expected


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[1,2,3]",
        "[1,2,3,4,5]",
        "[[1,2]]",
        "[[1],[2],[3],[4]]",
        "[[1,2],[3]]",
        "[[1,2,3],[4]]",
        "[[1,2],[3,4],[]]",
        "[1,2,[3,4]]",
        "[[1,2],3,4]",
        "[[[1,2],[3,4]]]",
        "[[[1],[2]],[[3],[4]]]",
        "1",
        '"[1,2,3,4]"',
        "null",
        '{"a":[1,2,3,4]}',
    ],
)
def test_shape_and_data_disagree(text: Any) -> None:
    """Too few, too many, ragged, nested otherwise, or no array."""
    with pytest.raises(BadShape):
        decode(text)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("dtype", "element"),
    [
        ("FP32", "true"),
        ("FP32", '"1"'),
        ("FP32", "null"),
        ("FP64", "{}"),
        ("INT32", "1.5"),
        ("INT32", "1.0"),
        ("INT32", "1e2"),
        ("INT32", "true"),
        ("INT8", "128"),
        ("INT8", "-129"),
        ("UINT8", "-1"),
        ("UINT8", "256"),
        ("UINT64", "18446744073709551616"),
        ("UINT64", "-1"),
        ("INT64", "9223372036854775808"),
        ("INT64", "1" * 5000),
        ("BOOL", "1"),
        ("BOOL", '"true"'),
        ("BYTES", "1"),
        ("BYTES", "null"),
    ],
)
def test_an_element_of_another_type(dtype: str, element: str) -> None:
    """Nothing is cast: an element has the dtype's type and range."""
    first = {"BOOL": "true", "BYTES": '"a"'}.get(dtype, "1")
    for text in (f"[{first},{element}]", f"[[{first},{element}]]"):
        with pytest.raises(BadType):
            decode(text, dtype, (1, 2))


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", ["FP32", "FP64"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, "9" * 5000])
def test_numbers_beyond_a_double(dtype: str, number: str) -> None:
    """Infinity by another name."""
    with pytest.raises(NonfiniteInput):
        decode(f"[0,{number}]", dtype, (1, 2))


@pytest.mark.usefixtures("both_ways")
def test_numbers_beyond_the_dtype() -> None:
    """1e39 fits a double, not FP32; what rounds to the largest FP32 does fit."""
    for number in ("1e39", "-1e39", "3.4028236e38"):
        with pytest.raises(NonfiniteInput):
            decode(f"[0,{number}]", "FP32", (1, 2))
    assert decode("[1e39,3.4028235e38]", "FP64", (1, 2))[0, 0] == 1e39
    assert decode("[1e-60,3.4028235e38]", "FP32", (1, 2)).tolist() == [[0.0, float(np.finfo("f4").max)]]


def test_fp16_is_binary_only() -> None:
    """As the protocol says."""
    with pytest.raises(BadType):
        decode("[1,2]", "FP16", (1, 2))


def test_strings_are_utf8() -> None:
    """Any text, brackets and commas included."""
    words = ["é", "", "[,]", '"', "\U0001f600", "\0"]
    assert decode(json.dumps(words), "BYTES", (6,)).tolist() == [word.encode() for word in words]


def test_empty_dimensions() -> None:
    """A free dimension may be zero: nothing, nested as deep as it goes."""
    assert decode("[]", "FP32", (2, 0)).shape == (2, 0)
    assert decode("[[],[]]", "FP32", (2, 0)).shape == (2, 0)
    with pytest.raises(BadShape):
        decode("[[]]", "FP32", (2, 0))


@pytest.mark.parametrize("nested", [False, True])
def test_a_long_array(nested: bool) -> None:
    """Longer than a piece: every number arrives, in order."""
    numbers = np.arange(300_000, dtype="<f8").reshape(3, 100, 1000) / 7
    text = json.dumps(numbers.tolist() if nested else numbers.ravel().tolist())
    assert len(text) > oip_json._PIECE_BYTES
    assert np.array_equal(decode(text, "FP64", numbers.shape), numbers)


def test_outputs_are_flat() -> None:
    """Row-major, whatever the array's layout."""
    array = np.arange(6, dtype="<i4").reshape(2, 3).T
    assert encode_elements("y", array).tolist() == [0, 3, 1, 4, 2, 5]
    assert encode_elements("y", np.array([[b"a", b"\xc3\xa9"]], object)) == ["a", "é"]


def test_outputs_that_json_cannot_carry() -> None:
    """Bytes that are no text are the request's fault, a non-finite number ours."""
    with pytest.raises(BadType, match="binary"):
        encode_elements("y", np.array([b"\xff"], object))
    for number in (np.nan, np.inf):
        with pytest.raises(InternalError):
            encode_elements("y", np.array([number], "<f4"))
