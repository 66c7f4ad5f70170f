"""Ten times the load that a server carries: who is answered, who is refused, and how soon each one knows."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
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
    interval_s = CONNECTIONS / (times * CAPACITY_PER_S)
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(await client.Connection.open(server.address))
            for _ in range(CONNECTIONS)
        ]
        answers = await _asked(connections, interval_s)
    return answers, len(answers) / DURATION_S


async def _asked(connections: list[client.Connection], interval_s: float) -> list[Answer]:
    answers: list[Answer] = []
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
    return answers


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

    async def post() -> tuple[client.Reply, float]:
        # A connection each: an idle one is closed after 10 s.
        async with await client.Connection.open(paced.address) as connection:
            return await connection.post(path, BODY, {}), time.monotonic()

    async def ask() -> tuple[client.Reply, float]:
        reply, replied_s = await post()
        if reply.status == 503:
            await asyncio.sleep(int(reply.headers["retry-after"]))
            again, _ = await post()
            assert again.status == 200
        return reply, replied_s

    async def burst() -> list[tuple[client.Reply, float]]:
        for _ in range(6):  # Then both gateways know the rate.
            reply, _ = await ask()
            assert reply.status == 200
        return await asyncio.gather(*(ask() for _ in range(260)))

    replies = asyncio.run(burst())
    drained_s = max(replied_s for reply, replied_s in replies if reply.status == 200)
    refused = [
        (int(reply.headers["retry-after"]), drained_s - replied_s)
        for reply, replied_s in replies
        if reply.status == 503
    ]
    # 100 rows per gateway at 50 to 100 rows a second, and fewer on a busy machine.
    assert max(named_s for named_s, _ in refused) >= 2
    assert all(1 <= named_s <= 2 * needed_s + 2 for named_s, needed_s in refused), refused
