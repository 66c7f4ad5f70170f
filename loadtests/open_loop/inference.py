"""Inference requests for a Halftone server, made from what the server says of its models."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.request import urlopen

import numpy as np

from loadtests.open_loop.exchange import Exchange, Mix
from loadtests.precision_contract import tiers_for

BodyFormat = Literal["binary", "json"]
#: Bytes per element and struct's or numpy's name of the OIP datatypes that examples use.
_NUMPY = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8", "INT32": "<i4", "UINT8": "u1", "BOOL": "?"}


def fetch(url: str) -> Any:
    """A JSON document."""
    with urlopen(url, timeout=30) as response:  # noqa: S310  The server that is being loaded.
        return json.load(response)


def mix_for(
    server: str,
    model: str,
    precisions: Mapping[str, float],
    rows: Mapping[int, float],
    formats: Mapping[BodyFormat, float],
) -> Mix:
    """Every combination of precision, number of rows and format, weighted by the product of its shares.

    Args:
        server: `http://host:port`.
        model: its name there.
        precisions: `X-Precision` value -> share; the empty one sends no header.
        rows: per request -> share.
        formats: `binary` or `json` -> share.

    Raises:
        KeyError: the model has no such tier or class.
    """
    metadata, example = fetch(f"{server}/v2/models/{model}"), fetch(f"{server}/v2/models/{model}/example")
    url = f"{server}/v2/models/{model}/infer"
    exchanges, weights = [], []
    for precision, precision_share in precisions.items():
        tiers = frozenset(tier.encode() for tier in tiers_for(metadata, precision or None))
        for count, rows_share in rows.items():
            for form, format_share in formats.items():
                body, headers = encode(example["inputs"], count, form)
                if precision:
                    headers["x-precision"] = precision
                label = f"{precision or 'default'}/{count}/{form}"
                exchanges.append(Exchange.post(url, body, headers, tiers, label))
                weights.append(precision_share * rows_share * format_share)
    return Mix(tuple(exchanges), tuple(weights))


def encode(inputs: Sequence[Mapping[str, Any]], rows: int, form: BodyFormat) -> tuple[bytes, dict[str, str]]:
    """A body of that many rows, the example's repeated, and its headers."""
    tensors, buffers = [], []
    for tensor in inputs:
        example_rows, *rest = tensor["shape"]
        row_size = len(tensor["data"]) // example_rows
        repeated = (list(tensor["data"]) * -(-rows // example_rows))[: rows * row_size]
        document = {"name": tensor["name"], "datatype": tensor["datatype"], "shape": [rows, *rest]}
        if form == "binary":
            buffers.append(_binary(tensor["datatype"], repeated))
            document["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            document["data"] = repeated
        tensors.append(document)
    head = {"inputs": tensors, "parameters": {"binary_data_output": form == "binary"}}
    text = json.dumps(head, separators=(",", ":")).encode()
    if form == "json":
        return text, {"content-type": "application/json"}
    return b"".join([text, *buffers]), {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(text)),
    }


def _binary(datatype: str, values: Sequence[Any]) -> bytes:
    """The OIP binary extension: little-endian values, or texts with their lengths before them."""
    if datatype == "BYTES":
        texts = [value.encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return np.array(values, dtype=_NUMPY[datatype]).tobytes()
