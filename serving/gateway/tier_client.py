"""How a gateway reaches a tier: the one interface, and what passes through it.

`serving.runtime.serve_tier_client` implements it over a Ray Serve handle; tests implement
it in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serving.errors import TierLost
from serving.tensors import Signature, Tensors

#: Beside the outputs of a guarded tier: [rows], uint8, 0 where a row is fine. No tensor has such a name.
OVERFLOW_FLAGS = "#overflow"
#: Replicas that a batch may be sent to in turn. Inference is idempotent; a batch that loses two
#: replicas may be what kills them.
ATTEMPTS = 2
#: What the flags say, as metrics and headers name it.
OVERFLOW_CAUSES = {1: "saturated", 2: "nonfinite"}


@dataclass(frozen=True, slots=True)
class BatchResult:
    """A computed batch."""

    #: And `OVERFLOW_FLAGS`, from a tier with a guard.
    outputs: Tensors
    #: Copy in, forward pass and copy out, on the device thread.
    compute_s: float


@dataclass(frozen=True, slots=True)
class TierDescription:
    """What a replica found itself to be once it had loaded, or why it could not."""

    device: str
    soc: str
    #: The precision that the replica's probe measured, such as `fp32-ieee`.
    effective: str
    kept_fp32: tuple[str, ...] = ()
    #: Weights that 16 bits cannot hold, a sentence each.
    weight_losses: tuple[str, ...] = ()
    #: Every switch that can lower precision, read back.
    switches: Mapping[str, str] = field(default_factory=dict)
    #: What the probe found, item by item.
    measured: Mapping[str, str] = field(default_factory=dict)
    #: Why the replica does not serve; None when it does.
    failure: str | None = None
    #: Why the device cannot honour the tier, which is no fault and will not pass.
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class TierReport:
    """What a replica tells gateways once it has started."""

    description: TierDescription
    #: None when the source itself could not be opened.
    signature: Signature | None
    #: A few rows of real input; none where they were not asked for, or the source failed to give any.
    example: Tensors
    #: Whether the source is a plain callable, which gateways need not import.
    is_plain: bool


class TierClient(Protocol):
    """One tier of one model."""

    @property
    def connected(self) -> int:
        """Replicas that take batches directly, now."""

    async def run(
        self, batch: Tensors, *, deadline_s: float = math.inf, is_suspect: bool = False
    ) -> BatchResult:
        """Compute a batch. Rows come back in order. Cancelled, it costs no compute if it only waits.

        Args:
            batch: model tensors, [rows, ...].
            deadline_s: on the loop's clock: when the last of those who wait for the rows gives up.
            is_suspect: it may be what ends replicas. It is sent to one replica at most, over a
                connection that shows whether that one ends with it.

        Raises:
            TierLost: the replica died, and so did the one that the batch was retried on.
            Deadline: it still waited in the replica at `deadline_s`.
            ModelError: the model's code raised.
        """

    async def run_background(self, batch: Tensors) -> BatchResult:
        """Compute a batch that nobody waits for, if a replica has nothing else to do.

        Raises:
            NotReady: none has.
            RequestError: what the tier answered.
        """

    async def report(self, *, with_example: bool) -> TierReport:
        """What the tier is. Waits until a replica has started.

        Args:
            with_example: whether the example is wanted: megabytes, for a model of images.
        """


def lost_with_replicas(tier: str, attempts: int, replicas_lost: int) -> TierLost:
    """The error of a batch that was tried `attempts` times in vain."""
    times = {1: "once", 2: "twice"}.get(attempts, f"{attempts} times")
    error = TierLost(f"tier {tier} lost its replica {times}")
    error.calls_lost = attempts
    error.replicas_lost = replicas_lost
    return error
