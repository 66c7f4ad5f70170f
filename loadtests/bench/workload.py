"""What is asked of every server: the rows, and how each server wants them written."""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

VALUES = 128
TEXTS = 64
_SHORTEST, _LONGEST = 20, 240  # Characters of a text: 5 to 60 tokens or so.

Array = NDArray[np.float32]
Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the rows that are sent to it, one per request.

    Attributes:
        name: `echo` or `model`.
        config: for Halftone, as YAML.
        rows: as bytes, what the peers' common model code takes.
    """

    name: str
    config: str
    rows: tuple[bytes, ...]

    @property
    def peer_model(self) -> str:
        """The model's name in `loadtests.peers`."""
        return "echo" if self.name == "echo" else "text"


def workloads(threads: int) -> dict[str, Workload]:
    """Both of them."""
    values = struct.pack(f"<{VALUES}f", *(n / VALUES for n in range(VALUES)))
    return {
        "echo": Workload("echo", _config("echo", "serving.models.echo:Echo", threads), (values,)),
        "model": Workload("model", _config("text", "serving.models.minilm:MiniLM", threads), texts()),
    }


def _config(name: str, source: str, threads: int) -> str:
    return f"models: [{{name: {name}, source: '{source}', tiers: {{fp32: {{threads: {threads}}}}}}}]\n"


def texts() -> tuple[bytes, ...]:
    """Sentences of Python's own documentation, shuffled: real text of mixed length."""
    words = re.sub(
        r"\s+",
        " ",
        " ".join(pydoc_data.topics.topics[key] for key in ("exceptions", "specialnames", "typesseq")),
    )
    sentences = [one.strip() for one in re.split(r"(?<=[.:]) ", words)]
    fitting = sorted({one for one in sentences if _SHORTEST <= len(one) <= _LONGEST})
    random.Random(0).shuffle(fitting)  # noqa: S311  A fixed order, no secret.
    return tuple(one.encode() for one in fitting[:TEXTS])


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server's requests and replies are written.

    Attributes:
        path: of the URL, for a workload.
        encode: workload and row -> body and headers.
        decode: body of a reply and its headers, names in lower case -> the output row.
    """

    path: Callable[[Workload], str]
    encode: Callable[[Workload, bytes], tuple[bytes, Headers]]
    decode: Callable[[bytes, Headers], Array]


def _row_for_json(workload: Workload, row: bytes) -> Any:
    if workload.name == "echo":
        return np.frombuffer(row, dtype=np.float32).tolist()
    return row.decode()


def _json_body(document: object) -> tuple[bytes, Headers]:
    return json.dumps(document, separators=(",", ":")).encode(), {"content-type": "application/json"}


def _oip_binary(workload: Workload, row: bytes) -> tuple[bytes, Headers]:
    if workload.name == "echo":
        name, datatype, shape, data = "x", "FP32", [1, VALUES], row
    else:
        name, datatype, shape, data = "text", "BYTES", [1], struct.pack("<I", len(row)) + row
    parameters = {"binary_data_size": len(data)}
    tensor = {"name": name, "shape": shape, "datatype": datatype, "parameters": parameters}
    text, _ = _json_body({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    return text + data, {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(text)),
        "x-precision": "fp32",
    }


def _oip_json(workload: Workload, row: bytes) -> tuple[bytes, Headers]:
    value = _row_for_json(workload, row)
    if workload.name == "echo":
        tensor = {"name": "x", "shape": [1, VALUES], "datatype": "FP32", "data": value}
    else:
        tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "data": [value]}
    return _json_body({"inputs": [tensor]})


def _floats(data: bytes) -> Array:
    return np.frombuffer(data, dtype=np.float32)


def _array(values: Sequence[Any]) -> Array:
    return np.array(values, dtype=np.float32).ravel()


OIP_BINARY = Dialect(
    lambda workload: f"/v2/models/{workload.peer_model}/infer",
    _oip_binary,
    lambda body, headers: _floats(body[int(headers["inference-header-content-length"]) :]),
)
OIP_JSON = Dialect(
    lambda workload: f"/v2/models/{workload.peer_model}/infer",
    _oip_json,
    lambda body, _: _array(json.loads(body)["outputs"][0]["data"]),
)
#: A row's bytes in, its output's bytes out.
RAW_RAY = Dialect(
    lambda _: "/",
    lambda _, row: (row, {"content-type": "application/octet-stream"}),
    lambda body, _: _floats(body),
)
RAW_MOSEC = Dialect(lambda _: "/inference", RAW_RAY.encode, RAW_RAY.decode)
LITSERVE = Dialect(
    lambda _: "/predict",
    lambda workload, row: _json_body({"x": _row_for_json(workload, row)}),
    lambda body, _: _array(json.loads(body)["y"]),
)
BENTOML = Dialect(
    lambda workload: f"/{workload.peer_model}",
    lambda workload, row: _json_body({"x": [_row_for_json(workload, row)]}),
    lambda body, _: _array(json.loads(body)),
)
