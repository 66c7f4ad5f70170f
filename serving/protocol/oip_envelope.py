"""The JSON part of an inference request: everything but the tensors' elements."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np

from serving.errors import (
    BadHeader,
    BadJson,
    BadShape,
    BadTensor,
    BadType,
    NonfiniteInput,
    RequestError,
    TooDeep,
    TooLarge,
)
from serving.protocol.oip_types import JsonScalar

MAX_NESTING = 100
_SCAN_BYTES = 1 << 20
#: Parameters become Python objects, many times their size; a tensor does not.
MAX_PARAMETERS_BYTES = 65_536
#: Checked before the JSON is parsed, by counting the keys that every input has. Text that is to
#: be computed on may hold such a word often, but hardly all of them.
MAX_TENSORS = 1024
_TENSOR_KEYS = (b'"name"', b'"datatype"', b'"shape"')


class TensorHeader(msgspec.Struct):
    """An input as the JSON describes it; `data` is not yet parsed."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, JsonScalar] | None = None
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class OutputHeader(msgspec.Struct):
    """A requested output as the JSON describes it."""

    name: str
    parameters: dict[str, JsonScalar] | None = None


class Envelope(msgspec.Struct):
    """The whole request. Unknown fields are ignored, as the protocol's extensions need."""

    inputs: list[TensorHeader]
    id: str | None = None
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    outputs: list[OutputHeader] | None = None


_ENVELOPE = msgspec.json.Decoder(Envelope)
_PARAMETERS = msgspec.json.Decoder(dict[str, JsonScalar] | None)

_OFFSET = re.compile(r"\(byte (\d+)\)")
_NONFINITE_LITERAL = re.compile(rb"(?i)nan|inf")
_MISSING_FIELD = re.compile(r"missing required field `(\w+)`")
_FIELD = re.compile(r"`\$(?:\.inputs\[\d*\])?\.(\w+)")
#: The error of a field that is missing or has the wrong form.
_FIELD_ERRORS: dict[str, type[RequestError]] = {
    "shape": BadShape,
    "datatype": BadType,
    "name": BadTensor,
    "inputs": BadTensor,
    "id": BadHeader,
}


def decode_envelope(text: bytes) -> Envelope:
    """Parse the JSON part of a request.

    Raises:
        TooDeep: It is nested more than `MAX_NESTING` levels.
        NonfiniteInput: It holds NaN, Infinity, or a number beyond a double's range.
        BadJson: It is not UTF-8 JSON, or not of the protocol's form.
        BadShape, BadType, BadTensor, BadHeader: That field is missing or has another form.
        TooLarge: It describes more than `MAX_TENSORS` tensors.
    """
    if is_too_deep(text):
        raise TooDeep(f"the JSON is nested more than {MAX_NESTING} levels deep")
    try:
        if not text.isascii():
            # The parser checks only the strings that it keeps.
            text.decode("utf-8")
        if min(text.count(key) for key in _TENSOR_KEYS) > MAX_TENSORS:
            raise TooLarge(f"the request describes more than {MAX_TENSORS} tensors")
        return _ENVELOPE.decode(text)
    except msgspec.ValidationError as error:
        raise _form_error(str(error)) from None
    except msgspec.DecodeError as error:
        raise _syntax_error(str(error), text) from None
    except UnicodeDecodeError:
        raise BadJson("the JSON is not UTF-8") from None
    except RecursionError:
        # Within the limit, but called from deep inside another program's stack.
        raise TooDeep("the JSON is nested too deeply") from None


def decode_parameters(raw: msgspec.Raw | msgspec.UnsetType) -> dict[str, JsonScalar]:
    """The request's `parameters`, each given once.

    Raises:
        BadJson: A value is no JSON scalar, or a name is repeated.
        NonfiniteInput: A number is beyond a double's range.
        TooLarge: They have more than `MAX_PARAMETERS_BYTES` bytes.
    """
    if isinstance(raw, msgspec.UnsetType):
        return {}
    if memoryview(raw).nbytes > MAX_PARAMETERS_BYTES:
        raise TooLarge(f"the parameters are larger than {MAX_PARAMETERS_BYTES} bytes")
    try:
        parameters: dict[str, JsonScalar] = _PARAMETERS.decode(raw) or {}
    except msgspec.ValidationError as error:
        if "out of range" in str(error):
            raise NonfiniteInput("a parameter holds a number that is out of range") from None
        raise BadJson("parameters must be an object of strings, numbers and booleans") from None
    except msgspec.DecodeError as error:
        raise BadJson(f"parameters: {error}") from None
    # A repeated name would let two readers of one request see two precisions. Every name
    # and every string has two quotes, so fewer quotes than this means that nothing is hidden.
    strings = len(parameters) + sum(isinstance(value, str) for value in parameters.values())
    if bytes(raw).count(b'"') != 2 * strings:
        json.loads(bytes(raw), object_pairs_hook=_refuse_repeated_names, parse_int=str)
    return parameters


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        raise BadJson("a parameter is given twice")


def is_too_deep(text: bytes) -> bool:
    """Whether brackets outside strings nest beyond `MAX_NESTING`, in linear time.

    Most bodies hold fewer brackets than that and cost two counts.
    """
    if text.count(b"[") + text.count(b"{") <= MAX_NESTING:
        return False
    if b"\\" in text:
        # Left to right, so that what follows an escaped backslash keeps its meaning.
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = text.translate(None, _OTHER_BYTES)
    depth, quotes = 0, 0
    for start in range(0, len(brackets), _SCAN_BYTES):
        codes = np.frombuffer(brackets, np.uint8, min(_SCAN_BYTES, len(brackets) - start), start)
        quotes_before = np.cumsum(codes == ord('"'), dtype=np.int32) + quotes
        steps = _DEPTH_STEP[codes]
        steps[quotes_before % 2 == 1] = 0  # inside a string
        depths = np.cumsum(steps, dtype=np.int32) + depth
        if depths.max() > MAX_NESTING:
            return True
        depth, quotes = int(depths[-1]), int(quotes_before[-1]) % 2
    return False


_OTHER_BYTES = bytes(set(range(256)) - set(b'"[]{}'))
_DEPTH_STEP = np.zeros(256, np.int8)
_DEPTH_STEP[list(b"[{")] = 1
_DEPTH_STEP[list(b"]}")] = -1


def _syntax_error(message: str, text: bytes) -> RequestError:
    """`NaN` and `Infinity` are no JSON, but clients send them and deserve to be told."""
    offset = _OFFSET.search(message)
    if offset is not None:
        start = max(0, int(offset[1]) - 2)
        if _NONFINITE_LITERAL.search(text, start, start + 6):
            return NonfiniteInput("the JSON holds NaN or Infinity")
    return BadJson(message if text else "the body is empty")


def _form_error(message: str) -> RequestError:
    if "out of range" in message and ".shape" not in message:
        return NonfiniteInput(f"a number is out of range: {message}")
    field = _MISSING_FIELD.search(message) or _FIELD.search(message)
    return _FIELD_ERRORS.get(field[1] if field else "", BadJson)(message)
