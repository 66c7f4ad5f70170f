"""Ten times the load that a server carries: who is answered, who is refused, and how soon each one knows."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import client
import numpy as np
import pytest
from server_process import ServerProcess, ready_server
from wellness import assert_still_well

CONFIG = """
server: {gateways: 2}
models:
  - name: paced
    source: mypackage.paced:build_slow
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    divergence: {sample: 0}
    tiers:
      fp32: {max_queue_rows: 16, batching: {max_rows: 2}}
      fp16: {max_queue_rows: 16, batching: {max_rows: 2}}
    default: standard
    classes:
      critical: fp32
      elastic: {tier: fp32, may_degrade_to: fp16}
      standard: fp16
  - name: queued
    source: mypackage.paced:build
    inputs: [{name: x, dtype: FP32, shape: [-1, 2]}]
    outputs: [{name: y, dtype: FP32, shape: [-1, 2]}]
    tiers: {fp32: {max_queue_rows: 100, batching: {max_rows: 2}}}
"""
PATH = "/v2/models/paced/infer"
X = np.array([[1.0, 2.0]], np.float32)
BODY = client.infer_body("x", X)
#: Two tiers, a batch of two rows each every 100 ms: slow enough for ten times as much to be asked for.
CAPACITY_PER_S = 2 * 2 / 0.1
DECLARED = ("critical", "elastic", "standard", "fp32", "fp16")
DURATION_S = 6.0
#: Far more than wait in queues at any time, so that the others go on asking.
CONNECTIONS = 600
EXACT = X / 3


@dataclass(frozen=True)
class Answer:
    """A reply, what was asked for, and how long it took."""

    declared: str
    reply: client.Reply
    took_s: float


async def offer(server: ServerProcess, times: float) -> tuple[list[Answer], float]:
    """Requests at `times` the capacity, whatever becomes of them, and the rate at which they were sent."""
    answers: list[Answer] = []
    interval_s = CONNECTIONS / (times * CAPACITY_PER_S)
    connections = [await client.Connection.open(server.address) for _ in range(CONNECTIONS)]
    began_s = time.monotonic()

    async def ask(number: int) -> None:
        due_s = began_s + interval_s * number / CONNECTIONS
        # Each connection declares another precision in turn.
        for precision in itertools.islice(itertools.cycle(DECLARED), number, None):
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            sent_s = time.monotonic()
            if sent_s > began_s + DURATION_S:
                break
            reply = await connections[number].post(PATH, BODY, {"x-precision": precision})
            ended_s = time.monotonic()
            answers.append(Answer(precision, reply, ended_s - sent_s))
            due_s = max(due_s + interval_s, ended_s)

    await asyncio.gather(*(ask(number) for number in range(CONNECTIONS)))
    for connection in connections:
        await connection.close()
    return answers, len(answers) / DURATION_S


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of known speed."""
    with ready_server(tmp_path_factory.mktemp("paced"), CONFIG) as process:
        yield process


def check_precision(answer: Answer) -> None:
    """The tier that was declared answered, to the bit, or a class's lower one that the reply names."""
    headers, found = answer.reply.headers, answer.reply.array("y")
    tier, reason = headers["x-precision-tier"], headers["x-precision-reason"]
    assert np.array_equal(found, EXACT if tier == "fp32" else EXACT.astype(np.float16).astype(np.float32))
    if answer.declared in {"critical", "fp32"}:
        assert tier == "fp32"
    elif answer.declared == "elastic":
        assert (tier, reason) in {("fp32", "class=elastic"), ("fp16", "degraded")}
    else:
        assert tier == "fp16"


def test_ten_times_overload(paced: ServerProcess) -> None:
    """Answered all 200; refused 503 within 50 ms at the median; nobody gets less than was declared."""
    answers, offered_per_s = asyncio.run(offer(paced, times=10))
    by_status = Counter(answer.reply.status for answer in answers)
    assert set(by_status) == {200, 503}, by_status
    refused = [answer for answer in answers if answer.reply.status == 503]
    for answer in refused:
        assert answer.reply.json()["code"] == "overloaded"
        assert 1 <= int(answer.reply.headers["retry-after"]) <= 60
    answered = [answer for answer in answers if answer.reply.status == 200]
    for answer in answered:
        check_precision(answer)
    reasons = Counter(answer.reply.headers["x-precision-reason"] for answer in answered)
    median_s = statistics.median(answer.took_s for answer in refused)
    print(f"{offered_per_s:.0f}/s offered, {by_status}, refused in {median_s * 1e3:.1f} ms, {reasons}")
    assert median_s <= 0.050
    assert offered_per_s > 9 * CAPACITY_PER_S
    assert len(answered) > 0.5 * CAPACITY_PER_S * DURATION_S
    assert reasons["degraded"] > 0
    paced.wait_for_metric("halftone_queue_rows", 0.0)
    calm = paced.call("POST", PATH, BODY, x_precision="elastic")
    assert (calm.status, calm.headers["x-precision-reason"]) == (200, "class=elastic")
    assert_still_well(paced, PATH, BODY, x_precision="critical")


def test_a_refused_client_that_waits_as_told_is_answered(paced: ServerProcess) -> None:
    """`Retry-After` is no guess: when the burst is over, the time that it named was enough."""
    path = "/v2/models/queued/infer"

    async def ask() -> client.Reply:
        connection = await client.Connection.open(paced.address)
        reply = await connection.post(path, BODY, {})
        if reply.status == 503:
            await asyncio.sleep(int(reply.headers["retry-after"]))
            again = await connection.post(path, BODY, {})
            assert again.status == 200
        await connection.close()
        return reply

    async def burst() -> list[client.Reply]:
        for _ in range(6):  # Then both gateways know the rate.
            assert (await ask()).status == 200
        return await asyncio.gather(*(ask() for _ in range(260)))

    replies = asyncio.run(burst())
    refused = [reply for reply in replies if reply.status == 503]
    assert refused
    # A gateway's 100 rows at 50 to 100 rows a second, and fewer on a busy machine.
    assert all(1 <= int(reply.headers["retry-after"]) <= 8 for reply in refused)
    assert max(int(reply.headers["retry-after"]) for reply in refused) >= 2
