"""Requests are made from what a server says of its model."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from loadtests.open_loop.inference import encode


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_binary_body_holds_the_examples_rows_in_turn(rows: int) -> None:
    """Head, then values, as the OIP extension wants them."""
    example = [{"name": "x", "datatype": "FP32", "shape": [2, 3], "data": [0, 1, 2, 3, 4, 5]}]
    body, headers = encode(example, rows, "binary")
    length = int(headers["inference-header-content-length"])
    tensor = json.loads(body[:length])["inputs"][0]
    assert tensor["shape"] == [rows, 3]
    assert tensor["parameters"]["binary_data_size"] == len(body) - length
    values = np.frombuffer(body[length:], dtype="<f4")
    assert values.tolist() == [float(n % 6) for n in range(3 * rows)]


def test_texts_carry_their_lengths() -> None:
    """BYTES in the binary extension."""
    example = [{"name": "t", "datatype": "BYTES", "shape": [1], "data": ["é"]}]
    body, headers = encode(example, 2, "binary")
    one = struct.pack("<I", 2) + "é".encode()
    assert body[int(headers["inference-header-content-length"]) :] == one * 2


def test_a_json_body_holds_the_data() -> None:
    """And asks for JSON."""
    example = [{"name": "x", "datatype": "INT64", "shape": [1, 2], "data": [7, 8]}]
    body, headers = encode(example, 2, "json")
    document = json.loads(body)
    assert document["inputs"][0]["data"] == [7, 8, 7, 8]
    assert document["parameters"] == {"binary_data_output": False}
    assert headers == {"content-type": "application/json"}
