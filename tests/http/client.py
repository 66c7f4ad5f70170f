"""HTTP clients for tests: one request at a time, or many connections that never wait for one another."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Reply:
    """A response: header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def array(self, name: str) -> np.ndarray:
        """An output of a JSON reply, in its shape."""
        output = next(output for output in self.json()["outputs"] if output["name"] == name)
        return np.array(output["data"], np.float32).reshape(output["shape"])


def call(address: tuple[str, int], method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
    """One request on a connection of its own; header names are given with underscores."""
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body:
            sent.setdefault("content-type", "application/json")
        connection.request(method, path, body or None, sent)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, found, response.read())
    finally:
        connection.close()


def infer_body(name: str, array: np.ndarray, datatype: str = "FP32") -> bytes:
    """A JSON inference request of one input."""
    data = array.ravel().tolist()
    tensor = {"name": name, "shape": list(array.shape), "datatype": datatype, "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def text_body(sentences: list[str]) -> bytes:
    """A JSON inference request for the text model."""
    tensor = {"name": "text", "shape": [len(sentences)], "datatype": "BYTES", "data": sentences}
    return json.dumps({"inputs": [tensor]}).encode()


class Connection:
    """A keep-alive connection for many requests in turn."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Connection:
        return cls(*await asyncio.open_connection(*address))

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = [line.partition(":") for line in head[1:] if line]
        found = {name.lower(): value.strip() for name, _, value in fields}
        answer = await self._reader.readexactly(int(found["content-length"]))
        return Reply(int(head[0].split()[1]), found, answer)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
