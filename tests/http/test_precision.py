"""The precision contract on a running server: the declared tier answers, and its arithmetic shows."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import client
import numpy as np
import pytest
import torch
from server_process import MODELS, ServerProcess

from serving.models.minilm import MiniLM
from serving.tensors import Tensors

ECHO = "/v2/models/echo/infer"
DECLARATIONS = {"fp32": "fp32", "fp16": "fp16", "critical": "fp32", "bulk": "fp16", None: "fp16"}


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance, the largest over rows."""
    distance = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(distance.max())


def reference(sentences: list[str]) -> np.ndarray:
    """Embeddings by a direct torch call, without any of the server."""
    source = MiniLM()
    inputs: Tensors = {"text": np.array([s.encode() for s in sentences], dtype=object)}
    arguments = [torch.from_numpy(array) for array in source.preprocess(inputs).values()]
    with torch.inference_mode():
        embeddings: np.ndarray = source.build().eval()(*arguments).numpy()
    return embeddings


@pytest.mark.parametrize(
    ("declared", "tier", "reason"),
    [
        ("fp32", "fp32", "tier"),
        ("fp16", "fp16", "tier"),
        ("mixed", "mixed", "tier"),
        ("critical", "fp32", "class=critical"),
        ("bulk", "fp16", "class=bulk"),
        (None, "fp16", "default"),
    ],
)
def test_the_declared_tier_answers(
    server: ServerProcess, declared: str | None, tier: str, reason: str
) -> None:
    """Headers and body name the tier, what it computed with, and why it answered."""
    headers = {} if declared is None else {"x_precision": declared}
    reply = server.call("POST", "/v2/models/text/infer", client.text_body(["hello"]), **headers)
    assert reply.status == 200
    effective = "fp32-ieee" if tier == "fp32" else "fp16-emulated"
    facts = {"precision_tier": tier, "precision_effective": effective, "precision_reason": reason}
    assert reply.json()["parameters"] == facts
    assert {name: reply.headers["x-" + name.replace("_", "-")] for name in facts} == facts


def test_the_body_may_declare_too(server: ServerProcess) -> None:
    """`parameters.precision` counts as the header does; both must agree."""
    body = client.infer_body("x", np.zeros((1, 128)))[:-1] + b', "parameters": {"precision": "fp32"}}'
    assert server.call("POST", ECHO, body).headers["x-precision-tier"] == "fp32"
    assert server.call("POST", ECHO, body, x_precision="fp32").status == 200
    assert server.call("POST", ECHO, body, x_precision="fp16").json()["code"] == "bad_precision"


def test_tiers_differ_by_what_their_precision_differs(server: ServerProcess) -> None:
    """FP32 equals torch; FP16 is neither equal nor far; mixed lies no farther than FP16."""
    sentences = ["The cat sat on the mat.", "Interest rates rose.", "x", ""]
    expected = reference(sentences)
    distance = {
        tier: relative_l2(
            server.call("POST", "/v2/models/text/infer", client.text_body(sentences), x_precision=tier).array(
                "embedding"
            ),
            expected,
        )
        for tier in ("fp32", "fp16", "mixed")
    }
    assert distance["fp32"] <= 1e-6
    assert 1e-5 < distance["fp16"] < 1e-2
    assert 1e-5 < distance["mixed"] <= distance["fp16"] * 1.5


def test_vision_logits_differ_slightly(server: ServerProcess) -> None:
    """The second embedded model answers at both tiers, close to one another."""
    example = server.call("GET", "/v2/models/vision/example").body
    replies = {
        tier: server.call("POST", "/v2/models/vision/infer", example, x_precision=tier).array("logits")
        for tier in ("fp32", "fp16")
    }
    assert replies["fp32"].shape[1] == 1000
    assert 0 < relative_l2(replies["fp16"], replies["fp32"]) < 2e-2
    assert (replies["fp32"].argmax(1) == replies["fp16"].argmax(1)).all()


def test_a_strangers_module_is_served(server: ServerProcess) -> None:
    """`source: mypackage.module:build` imports nothing of Halftone, and both tiers answer."""
    assert "import serving" not in (MODELS / "mypackage" / "module.py").read_text()
    torch.manual_seed(7)
    body_layer, head = torch.nn.Linear(128, 64), torch.nn.Linear(64, 10)
    x = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
    with torch.inference_mode():
        expected = head(torch.relu(body_layer(torch.from_numpy(x)))).numpy()
    body = client.infer_body("x", x)
    fp32 = server.call("POST", "/v2/models/classifier/infer", body).array("y")
    fp16 = server.call("POST", "/v2/models/classifier/infer", body, x_precision="fp16").array("y")
    assert relative_l2(fp32, expected) <= 1e-6
    assert 1e-5 < relative_l2(fp16, expected) < 1e-2


async def _many(server: ServerProcess, connections: int, jobs: list[Any]) -> list[client.Reply]:
    """Every job (path, body, headers), spread over keep-alive connections; replies in order."""
    replies: dict[int, client.Reply] = {}
    todo = iter(enumerate(jobs))

    async def work() -> None:
        connection = await client.Connection.open(server.address)
        for index, (path, body, headers) in todo:
            replies[index] = await connection.post(path, body, headers)
        await connection.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    return [replies[index] for index in range(len(jobs))]


def _binary_echo(x: np.ndarray) -> tuple[bytes, dict[str, str]]:
    head = (
        b'{"inputs":[{"name":"x","shape":[%d,128],"datatype":"FP32",'
        b'"parameters":{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}'
        % (len(x), x.nbytes)
    )
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    return head + x.tobytes(), headers


def test_ten_thousand_declarations_are_honoured(server: ServerProcess) -> None:
    """Random declarations and row counts: the tier is the declared one, the rows are the request's own.

    The echo model shows both at once: FP32 returns the input to the bit, FP16 rounds it.
    """
    generator = random.Random(1)
    rows = np.random.default_rng(1)
    jobs, expected = [], []
    for _ in range(10_000):
        declared = generator.choice(list(DECLARATIONS))
        x = rows.standard_normal((generator.choice([1, 1, 1, 2, 7, 40]), 128)).astype(np.float32)
        body, headers = _binary_echo(x)
        if declared is not None:
            headers["x-precision"] = declared
        jobs.append((ECHO, body, headers))
        expected.append((DECLARATIONS[declared], x))
    replies = asyncio.run(_many(server, 32, jobs))
    for reply, (tier, x) in zip(replies, expected, strict=True):
        assert reply.status == 200, reply.body
        assert reply.headers["x-precision-tier"] == tier
        y = np.frombuffer(reply.body[int(reply.headers["inference-header-content-length"]) :], np.float32)
        want = x if tier == "fp32" else x.astype(np.float16).astype(np.float32)
        assert np.array_equal(y, want.ravel())


def test_no_reply_is_another_requests_under_load(server: ServerProcess) -> None:
    """64 clients, mixed headers, real sentences: each gets its own embedding at its own precision."""
    sentences = [f"Sentence number {n} speaks of {n * 37} different things." for n in range(64)]
    expected = reference(sentences)
    tiers = ["fp32", "fp16", "mixed"]
    jobs = [
        ("/v2/models/text/infer", client.text_body([sentences[n % 64]]), {
            "content-type": "application/json", "x-precision": tiers[n % 3],
        })
        for n in range(192)
    ]  # fmt: skip
    replies = asyncio.run(_many(server, 64, jobs))
    for n, reply in enumerate(replies):
        assert reply.status == 200, reply.body
        distance = relative_l2(reply.array("embedding"), expected[n % 64 : n % 64 + 1])
        assert reply.headers["x-precision-tier"] == tiers[n % 3]
        if tiers[n % 3] == "fp32":
            assert distance <= 1e-6
        else:
            assert 1e-5 < distance < 1e-2
