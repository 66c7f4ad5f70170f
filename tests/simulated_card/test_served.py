"""The whole server on simulated 910B1 cards (stub CANN): memory that runs out, cards that break."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import client
import networks
import numpy as np
import pytest
from card import IEEE, SimulatedCard
from contract_child import distance, on_cpu, vision_rows
from load import wait_until
from served import MEMORY_MB, PATH, ask, serving, where
from server_process import ServerProcess
from wellness import assert_still_well

TIERS = ["fp16: {replicas: 2, resources: {NPU: 1}}", "fp32: {resources: {NPU: 1}}"]
REPLACED_WITHIN_S = 90.0


@pytest.fixture(scope="module")
def ieee(card: SimulatedCard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Three cards: FP16 on two, FP32 on one."""
    with serving(card, IEEE, TIERS, tmp_path_factory.mktemp("ieee")) as server:
        yield server


def fp16_replicas(server: ServerProcess) -> dict[int, int]:
    """Process -> card of the replicas that answer a burst."""
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: ask(server, vision_rows(1)), range(32)))
    return {where(reply)[2]: where(reply)[0] for reply in replies if reply.status == 200}


def test_both_tiers_answer_as_what_they_are(ieee: ServerProcess) -> None:
    """FP32 is the CPU's to the bit, FP16 is near it, and the model's page names the card."""
    x = vision_rows()
    wanted = on_cpu(networks.vision(), x)
    fp32, fp16 = ask(ieee, x, "fp32"), ask(ieee, x, "fp16")
    assert (fp32.status, fp32.headers["x-precision-effective"]) == (200, "fp32-ieee"), fp32.body
    assert np.array_equal(fp32.array("logits"), wanted)
    assert (fp16.status, fp16.headers["x-precision-effective"]) == (200, "fp16"), fp16.body
    assert 1e-6 < distance(fp16.array("logits"), wanted) < 5e-3
    assert IEEE in ieee.call("GET", "/v2/models/vision").body.decode()


def test_each_replica_has_a_card_of_its_own(ieee: ServerProcess) -> None:
    """Three replicas, three cards, one visible to each."""
    fp32 = where(ask(ieee, vision_rows(1), "fp32"))
    fp16: dict[int, int] = {}

    def both_answer() -> bool:
        # A tier is ready once one of its replicas is; the gateway meets the other within seconds.
        fp16.update(fp16_replicas(ieee))
        return len(fp16) > 1

    wait_until(both_answer)
    assert len(fp16) == 2
    assert {fp32[0], *fp16.values()} == {0, 1, 2}
    assert fp32[1] == 1


def test_memory_that_runs_out_is_503_and_passes(ieee: ServerProcess) -> None:
    """A row too large for a card is refused; rows that are too large together are answered in parts."""
    x = vision_rows(4)
    x[0, 0, 0, 0] = 4 * MEMORY_MB
    refused = ask(ieee, x[:1])
    assert (refused.status, refused.json()["code"]) == (503, "device_oom")
    assert ask(ieee, x[1:]).status == 200
    assert_still_well(ieee, PATH, client.infer_body("x", vision_rows(1)))
    x[:, 0, 0, 0] = MEMORY_MB / 3
    answered = ask(ieee, x)
    assert answered.status == 200, answered.body
    assert distance(answered.array("logits"), on_cpu(networks.vision(), x)) < 5e-3


def test_a_card_that_breaks_costs_no_wrong_answer(ieee: ServerProcess) -> None:
    """A fault in the middle of a batch: the other replica gets it, and the broken one is replaced."""
    before = fp16_replicas(ieee)
    x = vision_rows(2)
    replies: list[client.Reply] = []
    replaced = threading.Event()

    def keep_asking() -> None:
        while not replaced.is_set():
            replies.append(ask(ieee, x))

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(keep_asking) for _ in range(4)]
        breaking = break_a_card(ieee, networks.BREAK)
        after = wait_for_two_replicas(ieee)
        replaced.set()
        for future in asking:
            future.result()
    assert len(before.keys() & after.keys()) == 1, ieee.output
    assert set(after.values()) == set(before.values())
    # Retried on the other replica, or refused if that was not to be had.
    check_answers([breaking], first=networks.BREAK)
    check_answers(replies)
    assert any(reply.status == 200 for reply in replies)


def test_a_card_that_breaks_between_batches_is_found(ieee: ServerProcess) -> None:
    """No request has to find out: a known answer is computed now and then, and the replica ends."""
    last = break_a_card(ieee, networks.BREAK_AFTERWARDS)
    assert last.status == 200
    check_answers([last], first=networks.BREAK_AFTERWARDS)
    give_up_s = time.monotonic() + REPLACED_WITHIN_S
    while Path(f"/proc/{where(last)[2]}").exists():
        assert time.monotonic() < give_up_s, ieee.output
        time.sleep(0.5)
    assert where(last)[2] not in wait_for_two_replicas(ieee)


def break_a_card(server: ServerProcess, how: float) -> client.Reply:
    """Have one replica, whichever gets the request, break its card."""
    trigger = server.config.parent / "trigger"
    trigger.touch()
    x = vision_rows(2)
    x[0, 0, 0, 0] = how
    reply = ask(server, x)
    assert not trigger.exists()
    return reply


def wait_for_two_replicas(server: ServerProcess) -> dict[int, int]:
    """Wait until two replicas of FP16 answer; process -> card."""
    give_up_s = time.monotonic() + REPLACED_WITHIN_S
    while len(found := fp16_replicas(server)) != 2:
        assert time.monotonic() < give_up_s, server.output
        time.sleep(1)
    return found


def check_answers(replies: list[client.Reply], first: float | None = None) -> None:
    """Every reply is right, or a 503 that says when to come back."""
    x = vision_rows(2)
    if first is not None:
        x[0, 0, 0, 0] = first
    wanted = on_cpu(networks.vision(), x)
    for reply in replies:
        assert reply.status in {200, 503}, reply.body
        if reply.status == 503:
            assert int(reply.headers["retry-after"]) >= 1
        else:
            assert distance(reply.array("logits"), wanted) < 5e-3
