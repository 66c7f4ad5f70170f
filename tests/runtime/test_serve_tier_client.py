"""The Serve handle as a `TierClient`: retried once, bounded in time, errors as they are."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from serving.errors import DeviceLost, ModelError, TierLost
from serving.gateway.tier_client import BatchResult
from serving.runtime import serve_tier_client
from serving.runtime.serve_tier_client import ServeTierClient

BATCH = {"x": np.zeros((1, 1))}
RESULT = BatchResult({"y": np.ones((1, 1))}, 0.001)


class FakeHandle:
    """A deployment handle whose calls end as a list says."""

    def __init__(self, *ends: Any) -> None:
        self.ends = list(ends)
        self.calls = 0

    def options(self, **_: Any) -> "FakeHandle":
        """The same handle for every method."""
        return self

    async def remote(self, *_: Any) -> Any:
        """The next end: raised, returned, or awaited."""
        self.calls += 1
        end = self.ends.pop(0)
        if isinstance(end, ActorDiedError):
            raise end
        return await end() if callable(end) else end


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_tier_client, "LOST_DEVICE_PAUSE_S", 0.0)


def run(handle: Any, timeout_s: float = 5.0) -> BatchResult:
    """One batch."""
    return asyncio.run(ServeTierClient(handle, "m/fp16", timeout_s).run(BATCH))


@pytest.mark.parametrize("lost", [ActorDiedError, lambda: DeviceLost("failed")])
def test_a_batch_whose_replica_is_lost_is_sent_once_more(lost: Callable[[], Any]) -> None:
    """Dead, or alive with a dead device."""
    handle = FakeHandle(lost(), RESULT)
    assert run(handle) is RESULT
    assert handle.calls == 2


@pytest.mark.parametrize("lost", [ActorDiedError, lambda: DeviceLost("failed")])
def test_a_batch_that_is_lost_twice_is_given_up(lost: Callable[[], Any]) -> None:
    """It may be what kills the replicas."""
    handle = FakeHandle(lost(), lost(), RESULT)
    with pytest.raises(TierLost, match="tier m/fp16 lost its replica twice"):
        run(handle)
    assert handle.calls == 2


def test_a_requests_own_error_is_not_retried() -> None:
    """It would only be the same again."""
    handle = FakeHandle(ModelError("the model raised"), RESULT)
    with pytest.raises(ModelError, match="the model raised"):
        run(handle)
    assert handle.calls == 1


def test_a_replica_that_does_not_answer_is_waited_for_no_longer_than_agreed() -> None:
    """All attempts together."""

    async def never() -> Any:
        await asyncio.sleep(60)

    with pytest.raises(TierLost, match=r"did not answer within 0\.05 s"):
        run(FakeHandle(never), timeout_s=0.05)
