"""Inference requests and replies of the Open Inference Protocol, version 2.

A body is JSON, or JSON followed by raw tensors (the binary tensor data extension), in
which case the header `Inference-Header-Content-Length` says where the JSON ends. What a
client claims is held against the signature and against the bytes at hand before anything
is allocated for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import orjson

from serving.errors import (
    BadHeader,
    BadShape,
    BadTensor,
    BadType,
    InternalError,
    TooLarge,
    quote,
)
from serving.protocol.oip_binary import BinaryLayout, BinaryReader, encode_binary, refuse_shared_memory
from serving.protocol.oip_envelope import Envelope, TensorHeader, decode_envelope, decode_parameters
from serving.protocol.oip_json import decode_elements, encode_elements
from serving.protocol.oip_types import InferRequest, JsonScalar, OutputRequest
from serving.tensors import (
    DTYPES,
    MAX_ELEMENTS,
    MAX_RANK,
    Array,
    Signature,
    Tensors,
    TensorSpec,
    element_count,
)

__all__ = ["HeadCache", "InferRequest", "JsonScalar", "OutputRequest", "decode_infer", "encode_infer"]

#: Where the JSON of a binary body ends, in bytes.
JSON_LENGTH_HEADER = "inference-header-content-length"
MAX_ID_LENGTH = 128
#: Bound what clients can make a `HeadCache` hold: 1 MiB of text.
MAX_CACHED_HEADS = 512
MAX_CACHED_HEAD_BYTES = 2048
MAX_CACHED_REPLIES = 8

_DTYPE_NAMES = {dtype.str: name for name, dtype in DTYPES.items()}
_MAX_ITEM_BYTES = 8
_Headers = list[tuple[str, str]]
_ReplyKey = tuple[Any, ...]
_JSON_HEADERS = [("content-type", "application/json")]


def decode_infer(
    body: bytes,
    json_length: int | None,
    signature: Signature,
    *,
    max_rows: int | None = None,
    allow_nonfinite: Collection[str] = (),
    heads: HeadCache | None = None,
) -> InferRequest:
    """Decode the body of an inference request.

    Args:
        body: The whole body, not compressed.
        json_length: `Inference-Header-Content-Length`, or `None` for a body of JSON alone.
        signature: What the model takes and gives.
        max_rows: Rows that a request may have, checked before its elements are parsed.
        allow_nonfinite: Inputs that may hold NaN and infinity (JSON cannot express them).
        heads: Heads decoded before, for this signature and `max_rows`.

    Raises:
        BadJson: The JSON is malformed, or not of the protocol's form.
        TooDeep: It is nested more than 100 levels.
        NonfiniteInput: A number is NaN, infinite or beyond its dtype's range.
        BadType: A datatype or an element is not of the signature's dtype.
        BadShape: A shape is not the signature's, or disagrees with the data or its rows.
        BadTensor: A tensor is missing, unknown, given twice, or its data is.
        BadHeader: `json_length`, `binary_data_size` or the request's id has no valid value.
        TooLarge: There are more than `max_rows` rows.
    """
    if json_length is not None and not 0 <= json_length <= len(body):
        raise BadHeader("Inference-Header-Content-Length is not within the body")
    text = body if json_length is None else body[:json_length]
    head = heads.get(text) if heads is not None else None
    if head is None:
        head = _decode_head(text, signature, max_rows)
        if heads is not None:
            heads.put(text, head)
    if head.layout is not None and len(body) == len(text) + head.layout.size_bytes:
        arrays = head.layout.read(body, len(text), allow_nonfinite)
        return InferRequest(head.id, arrays, head.rows, head.parameters, head.outputs, head)
    reader = BinaryReader(body, len(text))
    arrays = {
        spec.name: _decode_tensor(header, spec, reader, spec.name in allow_nonfinite)
        for header, spec in head.inputs
    }
    reader.finish()
    if len(arrays) > 1:
        arrays = {spec.name: arrays[spec.name] for spec in signature.inputs}
    return InferRequest(head.id, arrays, head.rows, head.parameters, head.outputs, head)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The JSON part of a request, held against the signature. Shared by requests: never changed."""

    id: str | None
    inputs: tuple[tuple[TensorHeader, TensorSpec], ...]
    rows: int
    parameters: Mapping[str, JsonScalar]
    outputs: tuple[OutputRequest, ...]
    #: Where the tensors lie behind it; None where that takes more than numbers of known size.
    layout: BinaryLayout | None
    #: JSON of replies to such a request, by what is said in it.
    replies: dict[_ReplyKey, bytes] = field(default_factory=dict, compare=False)

    @property
    def has_elements(self) -> bool:
        """Whether elements of a tensor stand in it."""
        return any(header.data is not msgspec.UNSET for header, _ in self.inputs)


class HeadCache:
    """Heads by their exact bytes, the newest `MAX_CACHED_HEADS`.

    A caller of the binary extension sends the same JSON with other tensors behind it again and
    again. What the JSON means depends on its bytes and the signature alone.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, RequestHead] = {}

    def get(self, text: bytes) -> RequestHead | None:
        """The head that these bytes were found to mean before."""
        return self._heads.get(text) if len(text) <= MAX_CACHED_HEAD_BYTES else None

    def put(self, text: bytes, head: RequestHead) -> None:
        """Remember a head, unless it is long or holds elements: those differ each time."""
        if len(text) > MAX_CACHED_HEAD_BYTES or head.has_elements:
            return
        if len(self._heads) >= MAX_CACHED_HEADS:
            del self._heads[next(iter(self._heads))]
        self._heads[text] = head


def _decode_head(text: bytes, signature: Signature, max_rows: int | None) -> RequestHead:
    envelope = decode_envelope(text)
    request_id = _checked_id(envelope.id)
    parameters = decode_parameters(envelope.parameters)
    specs = _matched_specs(envelope.inputs, signature)
    rows = _checked_rows(envelope.inputs, specs, max_rows)
    outputs = _requested_outputs(envelope, signature, parameters)
    inputs = tuple(zip(envelope.inputs, specs, strict=True))
    layout = BinaryLayout.of(
        [
            (spec, header.shape, (header.parameters or {}).get("binary_data_size"))
            for header, spec in inputs
            if header.data is msgspec.UNSET
        ]
        if len(inputs) == len(signature.inputs)
        else [],
        [spec.name for spec in signature.inputs],
    )
    return RequestHead(request_id, inputs, rows, MappingProxyType(parameters), outputs, layout)


def _checked_id(request_id: str | None) -> str | None:
    if request_id is None or (
        len(request_id) <= MAX_ID_LENGTH and request_id.isascii() and request_id.isprintable()
    ):
        return request_id
    raise BadHeader(f"the request id must be at most {MAX_ID_LENGTH} printable ASCII characters")


def _matched_specs(headers: Sequence[TensorHeader], signature: Signature) -> list[TensorSpec]:
    """The signature's input for each of the request's, in the request's order."""
    specs: list[TensorSpec] = []
    for header in headers:
        spec = signature.input(header.name)
        if spec is None:
            raise BadTensor(f"the model has no input {quote(header.name)}")
        if spec in specs:
            raise BadTensor(f"input {quote(header.name)} is given twice")
        specs.append(spec)
    if len(specs) < len(signature.inputs):
        missing = next(spec.name for spec in signature.inputs if spec not in specs)
        raise BadTensor(f"input {quote(missing)} is missing")
    return specs


def _checked_rows(headers: Sequence[TensorHeader], specs: Sequence[TensorSpec], max_rows: int | None) -> int:
    for header, spec in zip(headers, specs, strict=True):
        if header.datatype != spec.dtype:
            raise BadType(
                f"input {quote(spec.name)} is {spec.dtype}, the request says {quote(header.datatype)}"
            )
        _check_shape(header.shape, spec)
    rows = headers[0].shape[0] if headers else 0
    if any(header.shape[0] != rows for header in headers):
        raise BadShape("the inputs have different numbers of rows (their first dimension)")
    if max_rows is not None and rows > max_rows:
        raise TooLarge(f"a request may have {max_rows} rows at most")
    return rows


def _check_shape(shape: Sequence[int], spec: TensorSpec) -> None:
    # The shape may be absurd: it is not repeated in the message, and its rank is checked first.
    name = quote(spec.name)
    if not 0 < len(shape) <= MAX_RANK:
        raise BadShape(f"input {name}: the shape must have 1 to {MAX_RANK} dimensions")
    if min(shape) < 0:
        raise BadShape(f"input {name}: the shape has a negative dimension")
    # An empty tensor has no elements, yet numpy multiplies its other dimensions and the item size.
    if element_count([max(size, 1) for size in shape]) > MAX_ELEMENTS // _MAX_ITEM_BYTES:
        raise BadShape(f"input {name}: the shape takes more than 2^63 - 1 bytes")
    if not spec.accepts(shape):
        raise BadShape(f"input {name}: the shape does not fit the model's {list(spec.shape)}, -1 being free")
    if shape[0] == 0:
        raise BadShape(f"input {name}: there must be at least one row")


def _decode_tensor(
    header: TensorHeader, spec: TensorSpec, reader: BinaryReader, allow_nonfinite: bool
) -> Array:
    parameters = header.parameters or {}
    refuse_shared_memory(spec.name, parameters)
    if "binary_data_size" in parameters:
        if header.data is not msgspec.UNSET:
            raise BadTensor(f"input {quote(spec.name)} has both data and binary_data_size")
        return reader.read(
            spec, header.shape, parameters["binary_data_size"], allow_nonfinite=allow_nonfinite
        )
    if isinstance(header.data, msgspec.UnsetType):
        raise BadTensor(f"input {quote(spec.name)} has neither data nor binary_data_size")
    return decode_elements(header.data, spec, header.shape)


def _requested_outputs(
    envelope: Envelope, signature: Signature, parameters: Mapping[str, JsonScalar]
) -> tuple[OutputRequest, ...]:
    default = _flag("binary_data_output", parameters, False)
    if not envelope.outputs:
        outputs = [OutputRequest(spec.name, default) for spec in signature.outputs]
    else:
        outputs = []
        for header in envelope.outputs:
            own = header.parameters or {}
            refuse_shared_memory(header.name, own)
            if own.get("classification"):
                raise BadTensor(f"output {quote(header.name)}: classification is not served")
            outputs.append(OutputRequest(header.name, _flag("binary_data", own, default)))
    _check_outputs(outputs, signature)
    return tuple(outputs)


def _flag(name: str, parameters: Mapping[str, JsonScalar], default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise BadHeader(f"parameter {name} must be true or false")
    return value


def _check_outputs(outputs: Sequence[OutputRequest], signature: Signature) -> None:
    seen: set[str] = set()
    for output in outputs:
        spec = signature.output(output.name)
        if spec is None:
            raise BadTensor(f"the model has no output {quote(output.name)}")
        if output.name in seen:
            raise BadTensor(f"output {quote(output.name)} is requested twice")
        if spec.dtype == "FP16" and not output.binary:
            raise BadType(f"output {quote(output.name)}: FP16 is sent in binary only, set binary_data")
        seen.add(output.name)


def encode_infer(
    model: str,
    version: str,
    request: InferRequest,
    outputs: Tensors,
    parameters: Mapping[str, JsonScalar],
) -> tuple[_Headers, bytes]:
    """Encode the reply to `request`: the outputs that it asked for, each as it asked.

    Args:
        model: The model's name.
        version: The model's version.
        request: The request, as `decode_infer` returned it.
        outputs: At least the requested outputs, each `[rows, ...]`.
        parameters: What the reply says about itself.

    Returns:
        The headers that describe the body, and the body.

    Raises:
        BadType: A `BYTES` output that was asked for in JSON is not UTF-8.
        InternalError: An output is absent, not finite in JSON, or of a dtype that the protocol lacks.
    """
    replies = request.head.replies if request.head is not None else {}
    key = _reply_key(request, outputs, parameters)
    if key is not None and (known := replies.get(key)) is not None:
        tail = [outputs[wanted.name].tobytes() for wanted in request.outputs]
        return _binary_headers(known), b"".join((known, *tail))
    described: list[dict[str, Any]] = []
    tail = []
    for wanted in request.outputs:
        array = outputs.get(wanted.name)
        if array is None:
            raise InternalError(f"output {quote(wanted.name)} was not computed")
        described.append(_describe_output(wanted, array, tail))
    reply: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id is not None:
        reply["id"] = request.id
    if parameters:
        reply["parameters"] = dict(parameters)
    reply["outputs"] = described
    text = orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tail:
        return list(_JSON_HEADERS), text
    if key is not None and len(replies) < MAX_CACHED_REPLIES:
        replies[key] = text
    return _binary_headers(text), b"".join((text, *tail))


def _binary_headers(text: bytes) -> _Headers:
    return [("content-type", "application/octet-stream"), (JSON_LENGTH_HEADER, str(len(text)))]


def _reply_key(
    request: InferRequest, outputs: Tensors, parameters: Mapping[str, JsonScalar]
) -> _ReplyKey | None:
    """All that the JSON of a reply in numbers of known size depends on; None for other replies."""
    described: list[Any] = list(parameters.items())
    for wanted in request.outputs:
        array = outputs.get(wanted.name)
        if array is None or not wanted.binary or array.dtype.kind == "O" or not array.dtype.isnative:
            return None
        described += (array.dtype.str, array.shape)
    return tuple(described)


def _describe_output(wanted: OutputRequest, array: Array, tail: list[bytes]) -> dict[str, Any]:
    """An output's entry in the JSON; its bytes are added to `tail` where it goes in binary."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    datatype = _DTYPE_NAMES.get(array.dtype.str)
    if datatype is None:
        raise InternalError(f"output {quote(wanted.name)} has a dtype that the protocol does not know")
    entry: dict[str, Any] = {"name": wanted.name, "datatype": datatype, "shape": array.shape}
    if wanted.binary:
        tail.append(encode_binary(wanted.name, array))
        entry["parameters"] = {"binary_data_size": len(tail[-1])}
    else:
        entry["data"] = encode_elements(wanted.name, array)
    return entry
