"""The hub's view of replicas: gauges of those that are heard, and what counts as a restart."""

from dataclasses import dataclass, replace

from prometheus_client import generate_latest

from serving.channel.endpoint import Endpoint
from serving.config import ModelConfig
from serving.runtime.replica_ledger import STALE_AFTER_S, STATES, Announcement, ReplicaLedger

MODEL = {"name": "m", "source": "a:b", "tiers": {"fp32": {"replicas": 2}, "fp16": {}}}


@dataclass
class Clock:
    """Time that the test moves."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class Tier:
    """One tier's replicas, as a test wants them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ledger = ReplicaLedger([ModelConfig.model_validate(MODEL)], self.clock)
        self.alive: dict[str, Announcement] = {}

    def begin(self, name: str, state: str = "loading") -> None:
        """A replica is heard for the first time."""
        said = Announcement("m:fp32", name, state)  # type: ignore[arg-type]
        self.ledger.take(said)
        self.alive[name] = replace(said, state="serving", endpoint=Endpoint("m:fp32", name, "host", "ipc"))

    def kill(self, name: str) -> None:
        """It says nothing more."""
        del self.alive[name]

    def leave(self, name: str) -> None:
        """It says goodbye."""
        self.ledger.take(replace(self.alive.pop(name), is_goodbye=True))

    def go_on(self, seconds: float) -> None:
        """Time goes by; who lives is heard every second."""
        for _ in range(int(seconds)):
            self.clock.now_s += 1
            for said in self.alive.values():
                self.ledger.take(said)

    @property
    def restarts(self) -> float:
        value = self.ledger.registry.get_sample_value(
            "halftone_replica_restarts_total", {"model": "m", "tier": "fp32"}
        )
        assert value is not None
        return value

    def gauge(self, name: str, **labels: str) -> float | None:
        """A gauge of the tier."""
        found: float | None = self.ledger.registry.get_sample_value(
            name, {"model": "m", "tier": "fp32", **labels}
        )
        return found


def test_every_series_is_there_before_the_first_replica() -> None:
    """So that Prometheus sees a rise from 0, and an alert can tell none from unknown."""
    tier = Tier()
    assert tier.restarts == 0
    assert {state: tier.gauge("halftone_replicas", state=state) for state in STATES} == dict.fromkeys(
        STATES, 0
    )
    assert tier.gauge("halftone_replicas_configured") == 2


def test_a_replica_that_was_killed_and_replaced_is_a_restart() -> None:
    """Whether the new one begins before or after the old one is missed."""
    for pause_s in (2, STALE_AFTER_S + 3):
        tier = Tier()
        tier.begin("a")
        tier.begin("b")
        tier.go_on(10)
        tier.kill("a")
        tier.go_on(pause_s)
        tier.begin("c")
        tier.go_on(10)
        assert tier.restarts == 1
        assert tier.gauge("halftone_replicas", state="serving") == 2


def test_one_that_dies_while_it_loads_again_and_again_is_counted_each_time() -> None:
    """As one that is out of memory."""
    tier = Tier()
    for life in range(5):
        tier.begin(f"life {life}")
        tier.kill(f"life {life}")
        tier.go_on(4)
    tier.go_on(10)
    assert tier.restarts == 4


def test_a_replica_that_says_goodbye_is_none() -> None:
    """An update replaces them, the new ones first or the old ones."""
    tier = Tier()
    tier.begin("a")
    tier.begin("b")
    tier.go_on(10)
    tier.begin("c")
    tier.go_on(2)
    tier.leave("a")
    tier.leave("b")
    tier.go_on(1)
    tier.begin("d")
    tier.go_on(10)
    assert tier.restarts == 0
    assert [endpoint.replica for endpoint in tier.ledger.endpoints()] == ["c", "d"]


def test_a_replica_that_stalls_and_returns_is_none() -> None:
    """Nothing began in its stead; its gauges vanish and return."""
    tier = Tier()
    tier.begin("a")
    tier.go_on(2)
    stalled = tier.alive.pop("a")
    tier.go_on(STALE_AFTER_S + 2)
    assert tier.ledger.endpoints() == ()
    assert tier.gauge("halftone_replicas", state="serving") == 0
    tier.alive["a"] = stalled
    tier.go_on(10)
    assert tier.restarts == 0
    assert len(tier.ledger.endpoints()) == 1


def test_a_new_hub_takes_those_that_live_for_no_restart() -> None:
    """It hears them for the first time, though they began long ago."""
    tier = Tier()
    tier.begin("a", state="serving")
    tier.begin("b", state="serving")
    tier.go_on(3)
    tier.kill("a")
    tier.go_on(10)
    assert tier.restarts == 0
    tier.begin("c")
    tier.go_on(10)
    assert tier.restarts == 1


def test_memory_is_the_sum_of_those_that_live() -> None:
    """By kind; of the dead nothing stays."""
    tier = Tier()
    for name, kinds in (("a", {"rss": 3}), ("b", {"rss": 4, "total": 10})):
        tier.ledger.take(Announcement("m:fp32", name, "serving", kinds))
    assert tier.gauge("halftone_device_memory_bytes", kind="rss") == 7
    assert tier.gauge("halftone_device_memory_bytes", kind="total") == 10
    tier.clock.now_s += STALE_AFTER_S + 1
    assert tier.gauge("halftone_device_memory_bytes", kind="rss") is None


def test_a_replica_of_another_configuration_is_not_heard() -> None:
    """The number of series is the configuration's."""
    tier = Tier()
    before = generate_latest(tier.ledger.registry)
    tier.ledger.take(Announcement("m:bf16", "x", "serving", {"rss": 1}))
    assert generate_latest(tier.ledger.registry) == before


def test_series_are_bounded_however_often_replicas_die() -> None:
    """And so is what is remembered of them."""
    tier = Tier()
    for life in range(3000):
        tier.begin(f"life {life}")
        tier.kill(f"life {life}")
        if life % 100 == 0:
            tier.go_on(6)
    known = tier.ledger._tiers["m:fp32"]
    assert len(known.lost) + len(known.begun_s) + len(known.lives) < 3 * 1024
    assert len(generate_latest(tier.ledger.registry).splitlines()) < 40
