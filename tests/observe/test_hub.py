"""The merged page: no total falls, dead gauges vanish, any label value is escaped."""

import math
from collections import Counter as Tally
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from serving.observe import hub as hub_module
from serving.observe.hub import MAX_DEAD_PROCESSES, SILENT_AFTER_S, Forgotten, Hub
from serving.observe.metrics import DURATION_BUCKETS_S, GatewayMetrics
from serving.observe.snapshot import take_snapshot

STALE_AFTER_S = 5.0


@dataclass
class Process:
    """A process with its own registry."""

    name: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.done = Counter("done", "Work.", ["tier"], registry=self.registry)
        self.size = Histogram("size", "Sizes.", ["tier"], buckets=(1, 10), registry=self.registry)
        self.queue = Gauge("queue", "Rows.", ["tier"], registry=self.registry)
        self.info = Gauge("tier_info", "Facts.", ["tier"], registry=self.registry)
        self.info.labels("fp32").set(1)

    def work(self, tier: str, amount: int) -> None:
        """Count something and leave it in the queue."""
        self.done.labels(tier).inc(amount)
        self.size.labels(tier).observe(amount)
        self.queue.labels(tier).set(amount)


@dataclass
class Clock:
    """Time that the test moves."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_process_has_its_own_page_while_it_lives() -> None:
    """And the hub has one; the dead do not, though their totals count."""
    hub, clock = make_hub()
    one, other = Process("one"), Process("other")
    hub.push_own(take_snapshot(Process("hub").registry))
    for process, amount in ((one, 2), (other, 3)):
        process.work("fp16", amount)
        hub.push(process.name, take_snapshot(process.registry))
    assert hub.processes() == ["one", "other", "hub"]
    page = hub.render_process("other")
    assert page is not None
    assert b'done_total{tier="fp16"} 3.0' in page
    own = hub.render_process("hub", openmetrics=True)
    assert own is not None
    assert b"done_total{" not in own
    assert hub.render_process("nobody") is None
    clock.now_s += STALE_AFTER_S + 1
    hub.push("one", take_snapshot(one.registry))
    assert hub.processes() == ["one", "hub"]
    assert hub.render_process("other") is None
    assert b'done_total{tier="fp16"} 5.0' in hub.render()


def make_hub() -> tuple[Hub, Clock]:
    """A hub and its clock."""
    clock = Clock()
    return Hub(clock=clock, stale_after_s=STALE_AFTER_S), clock


def values(hub: Hub) -> dict[tuple[str, str], float]:
    """Sample name and tier (with the bucket's bound) -> merged value."""
    return {
        (name, "".join(value for _, value in labels)): value
        for family in hub.merged()
        for (name, labels), value in family.samples.items()
    }


class Fleet(RuleBasedStateMachine):
    """Processes that work, push, stall, return, die and are replaced, and what ought to be counted.

    So does the hub. A process that pushes keeps the hub's past, as gateways do, and hands it to the
    next hub that it meets.
    """

    TIERS = st.sampled_from(["fp32", "fp16"])

    def __init__(self) -> None:
        super().__init__()
        self.hub, self.clock = make_hub()
        self.processes: list[Process] = []
        self.kept: dict[str, tuple[str, bytes]] = {}
        self.pushed_s: dict[str, float] = {}
        self.pushed_done: Tally[tuple[str, str]] = Tally()
        self.pushed_queue: dict[tuple[str, str], float] = {}
        self.before: dict[tuple[str, str], float] = {}

    @rule()
    def start(self) -> None:
        """A process starts, or one that died starts again under another name."""
        self.processes.append(Process(f"p{len(self.pushed_s)}-{len(self.processes)}"))

    @rule(data=st.data(), tier=TIERS, amount=st.integers(0, 20))
    def work(self, data: st.DataObject, tier: str, amount: int) -> None:
        """Any process counts; the hub hears of it with the next push."""
        if self.processes:
            data.draw(st.sampled_from(self.processes)).work(tier, amount)

    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        """Any process pushes, however long it was silent; one that is forgotten ends."""
        if self.processes:
            self.push_one(data.draw(st.sampled_from(self.processes)))

    def push_one(self, process: Process) -> None:
        met, past = self.kept.get(process.name, (self.hub.name, b""))
        if met != self.hub.name:
            self.hub.restore(past)
        try:
            self.hub.push(process.name, take_snapshot(process.registry))
        except Forgotten:
            self.processes.remove(process)
            return
        self.kept[process.name] = (self.hub.name, self.hub.past())
        self.pushed_s[process.name] = self.clock.now_s
        for tier in ("fp32", "fp16"):
            key = (process.name, tier)
            self.pushed_done[key] = process.registry.get_sample_value("done_total", {"tier": tier}) or 0
            self.pushed_queue[key] = process.registry.get_sample_value("queue", {"tier": tier}) or 0

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        """Time goes by; who did not push in it is dead until it does."""
        self.clock.now_s += seconds

    @rule(data=st.data())
    def replace_hub(self, data: st.DataObject) -> None:
        """The hub dies a moment after the living have pushed; they push to the next one in any order."""
        alive = [process for process in self.processes if self.hub.is_alive(process.name)]
        if not alive:
            return
        for process in alive:
            self.push_one(process)
        self.hub = Hub(f"{self.hub.name}+", clock=self.clock, stale_after_s=STALE_AFTER_S, settle_s=1.0)
        for process in data.draw(st.permutations(alive)):
            self.push_one(process)

    @invariant()
    def totals_are_the_sums_of_what_was_pushed(self) -> None:
        """Of all processes, alive or not, each once."""
        merged = values(self.hub)
        for tier in ("fp32", "fp16"):
            total = sum(value for (_, of), value in self.pushed_done.items() if of == tier)
            assert merged.get(("done_total", tier), 0) == total
            assert merged.get(("size_sum", tier), 0) == total

    @invariant()
    def no_total_falls(self) -> None:
        """Whatever happened since the last look."""
        now = {key: value for key, value in values(self.hub).items() if key[0].startswith(("done", "size"))}
        assert all(now[key] >= value for key, value in self.before.items())
        self.before = now

    @invariant()
    def gauges_are_those_of_the_living(self) -> None:
        """Summed; a dead process holds nothing in its queue."""
        merged = values(self.hub)
        alive = {name for name, at in self.pushed_s.items() if self.clock.now_s - at <= STALE_AFTER_S}
        for tier in ("fp32", "fp16"):
            held = sum(v for (name, of), v in self.pushed_queue.items() if of == tier and name in alive)
            assert merged.get(("queue", tier), 0) == held
        assert all(self.hub.is_alive(name) == (name in alive) for name in self.pushed_s)

    @invariant()
    def the_page_parses(self) -> None:
        """In both formats."""
        list(parse_plain(self.hub.render().decode()))
        list(parse_openmetrics(self.hub.render(openmetrics=True).decode()))


@pytest.fixture(autouse=True)
def few_dead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some dead processes are forgotten in runs of a few dozen steps."""
    if request.cls is not None:
        monkeypatch.setattr(hub_module, "MAX_DEAD_PROCESSES", 3)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_process_that_stalled_and_returns_is_counted_once() -> None:
    """Its figures are cumulative: they replace what it pushed before."""
    hub, clock = make_hub()
    process = Process("p")
    process.work("fp32", 3)
    hub.push("p", take_snapshot(process.registry))
    clock.now_s += 60
    assert not hub.is_alive("p")
    assert values(hub)["done_total", "fp32"] == 3
    assert ("queue", "fp32") not in values(hub)
    process.work("fp32", 4)
    hub.push("p", take_snapshot(process.registry))
    assert hub.is_alive("p")
    assert values(hub)["done_total", "fp32"] == 7
    assert values(hub)["queue", "fp32"] == 4


def test_totals_outlive_any_number_of_processes() -> None:
    """The long dead are added up; memory does not grow with them."""
    hub, clock = make_hub()
    lives = MAX_DEAD_PROCESSES + 40
    for life in range(lives):
        process = Process(f"p{life}")
        process.work("fp32", 2)
        hub.push(process.name, take_snapshot(process.registry))
        clock.now_s += 60
    assert values(hub)["done_total", "fp32"] == 2 * lives
    assert values(hub)["size_bucket", "10.0fp32"] == lives
    assert len(hub._processes) <= MAX_DEAD_PROCESSES + 1
    assert ("queue", "fp32") not in values(hub)


def test_a_process_that_returns_after_many_deaths_is_not_counted_twice() -> None:
    """Its totals are in the sum of the long dead: it is told to start anew."""
    hub, clock = make_hub()
    stalled = Process("stalled")
    stalled.work("fp32", 7)
    hub.push("stalled", take_snapshot(stalled.registry))
    for life in range(MAX_DEAD_PROCESSES + 2):
        clock.now_s += 60
        hub.push(f"p{life}", take_snapshot(Process(f"p{life}").registry))
    with pytest.raises(Forgotten):
        hub.push("stalled", take_snapshot(stalled.registry))
    assert values(hub)["done_total", "fp32"] == 7
    assert not hub.is_alive("stalled")


def dying_hub() -> tuple[Hub, Clock, Process]:
    """A hub that knows one dead and one live process, and has counted something itself."""
    hub, clock = make_hub()
    dead, live, own = Process("dead"), Process("live"), Process("own")
    dead.work("fp32", 3)
    own.work("fp32", 100)
    hub.push("dead", take_snapshot(dead.registry))
    clock.now_s += 60
    live.work("fp32", 20)
    hub.push("live", take_snapshot(live.registry))
    hub.push_own(take_snapshot(own.registry))
    return hub, clock, live


def test_the_next_hub_learns_what_only_the_last_one_knew() -> None:
    """Totals of the dead and of the hub itself; their gauges stay away."""
    hub, clock, live = dying_hub()
    assert values(hub)["done_total", "fp32"] == 123
    successor = Hub("next", clock=clock, stale_after_s=STALE_AFTER_S)
    for _ in range(2):  # From every gateway.
        successor.restore(hub.past())
        successor.push("live", take_snapshot(live.registry))
    assert values(successor)["done_total", "fp32"] == 123
    assert values(successor)["queue", "fp32"] == 20


def test_a_new_hub_shows_no_page_before_it_is_whole() -> None:
    """It waits a moment, and for those that the last hub knew alive, but not for ever."""
    hub, clock, live = dying_hub()
    hub.push("other", take_snapshot(Process("other").registry))
    for others_push in (True, False):
        successor = Hub("next", clock=clock, stale_after_s=STALE_AFTER_S, settle_s=1.0)
        assert not successor.is_settled
        successor.restore(hub.past())
        successor.push("live", take_snapshot(live.registry))
        clock.now_s += 0.5
        assert not successor.is_settled
        clock.now_s += 1
        assert not successor.is_settled
        if others_push:
            successor.push("other", take_snapshot(Process("other").registry))
        else:
            clock.now_s += STALE_AFTER_S
        assert successor.is_settled


def test_the_version_of_the_past_tells_when_to_fetch_it() -> None:
    """Another one when a process dies or the hub counts; the same when figures of the living change."""
    hub, clock, live = dying_hub()
    version = hub.version
    live.work("fp32", 1)
    hub.push("live", take_snapshot(live.registry))
    assert hub.version == version
    clock.now_s += SILENT_AFTER_S + 0.1
    assert hub.version > version


def test_one_that_ends_is_told_when_another_keeps_its_totals() -> None:
    """So that an update that replaces it and the hub together loses nothing."""
    hub, clock, live = dying_hub()
    other = Process("other")
    other.work("fp32", 1000)
    hub.push("other", take_snapshot(other.registry))
    hub.push("live", take_snapshot(live.registry), is_last=True)
    assert not hub.is_kept("live")
    kept = hub.past("other")
    hub.push("live", take_snapshot(live.registry), is_last=True)
    assert hub.is_kept("live")
    successor = Hub("next", clock=clock, stale_after_s=STALE_AFTER_S, settle_s=1.0)
    successor.restore(kept)
    successor.push("other", take_snapshot(other.registry))
    clock.now_s += 1
    assert successor.is_settled
    assert values(successor)["done_total", "fp32"] == 1123


def test_the_last_one_waits_for_nobody() -> None:
    """There is no other to keep its totals."""
    hub, _, live = dying_hub()
    hub.push("live", take_snapshot(live.registry), is_last=True)
    assert hub.is_kept("live")


def test_no_process_is_forgotten_by_a_hub_that_has_just_begun() -> None:
    """However many were silent when the last one ended: those that live push within seconds."""
    hub, clock = make_hub()
    processes = [Process(f"p{life}") for life in range(3 * MAX_DEAD_PROCESSES)]
    for process in processes:
        process.work("fp32", 1)
        hub.push(process.name, take_snapshot(process.registry))
    clock.now_s += SILENT_AFTER_S + 0.1
    successor = Hub("next", clock=clock, stale_after_s=STALE_AFTER_S)
    successor.restore(hub.past())
    for process in processes:
        successor.push(process.name, take_snapshot(process.registry))
        assert successor.is_alive(process.name)
    assert values(successor)["done_total", "fp32"] == len(processes)


def test_one_that_may_be_dead_is_handed_on_before_that_is_certain() -> None:
    """A hub that dies within seconds of a gateway takes no totals with it."""
    hub, clock, live = dying_hub()
    clock.now_s += SILENT_AFTER_S + 0.1
    assert hub.is_alive("live")
    successor = Hub("next", clock=clock, stale_after_s=STALE_AFTER_S)
    successor.restore(hub.past())
    assert values(successor)["done_total", "fp32"] == 123
    assert not successor.is_alive("live")
    successor.push("live", take_snapshot(live.registry))
    assert values(successor)["done_total", "fp32"] == 123


@given(st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=40), st.randoms(use_true_random=False))
def test_sums_never_fall_by_a_digit(seconds: list[float], random: Random) -> None:
    """Whatever the order in which processes come, and however many are folded."""
    processes = []
    for life, value in enumerate(seconds):
        process = Process(f"p{life}")
        process.size.labels("fp32").observe(value)
        processes.append(process)
    hub, clock = make_hub()
    before = 0.0
    for process in processes:
        hub.push(process.name, take_snapshot(process.registry))
        clock.now_s += 60
        total = values(hub)["size_sum", "fp32"]
        assert total >= before
        assert total == pytest.approx(math.fsum(seconds[: processes.index(process) + 1]), rel=1e-12)
        successor = Hub("next", clock=clock, stale_after_s=STALE_AFTER_S)
        latest = processes[max(0, processes.index(process) - 5) : processes.index(process) + 1]
        random.shuffle(latest)
        for one in latest:
            successor.push(one.name, take_snapshot(one.registry))
        successor.restore(hub.past())
        assert values(successor)["size_sum", "fp32"] == total
        before = total


def test_the_same_fact_from_two_processes_is_one_fact() -> None:
    """`_info` gauges stay 1."""
    hub, _ = make_hub()
    for name in "pq":
        hub.push(name, take_snapshot(Process(name).registry))
    assert values(hub)["tier_info", "fp32"] == 1


def test_merging_changes_no_snapshot() -> None:
    """Looking twice gives the same page."""
    hub, _ = make_hub()
    for name in "pq":
        process = Process(name)
        process.work("fp32", 1)
        hub.push(name, take_snapshot(process.registry))
    assert hub.render() == hub.render()


@given(st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_label_value_is_escaped(text: str) -> None:
    """Quotes, backslashes, line breaks, any script: it comes back from a parser as it was."""
    hub, _ = make_hub()
    process = Process("p")
    process.work(text, 1)
    hub.push("p", take_snapshot(process.registry))
    for page, parse in ((hub.render(), parse_plain), (hub.render(openmetrics=True), parse_openmetrics)):
        found = {
            sample.labels["tier"]
            for family in parse(page.decode())
            for sample in family.samples
            if sample.name == "done_total"
        }
        assert found == {text}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gauge_that_is_no_number_leaves_the_page_readable(value: float) -> None:
    """And the other figures right."""
    hub, _ = make_hub()
    process = Process("p")
    process.work("fp32", 5)
    process.queue.labels("fp32").set(value)
    hub.push("p", take_snapshot(process.registry))
    for page, parse in ((hub.render(), parse_plain), (hub.render(openmetrics=True), parse_openmetrics)):
        samples = {s.name: s.value for family in parse(page.decode()) for s in family.samples}
        assert str(samples["queue"]) == str(value)
        assert samples["done_total"] == 5


def test_the_gateways_own_metrics_make_a_page() -> None:
    """Both formats, names with units and `_total`, no creation times, OpenMetrics with its end mark."""
    hub, _ = make_hub()
    for process, tier in (("p", "fp32"), ("q", "fp16"), ("q", "fp32")):
        metrics = GatewayMetrics(CollectorRegistry())
        metrics.requests.labels("m", tier, "200").inc()
        metrics.request_duration.series(("m", tier), DURATION_BUCKETS_S).observe(0.01)
        metrics.queue_rows.labels("m", tier).set(2)
        hub.push(process, take_snapshot(metrics.registry))
    plain, openmetrics = hub.render(), hub.render(openmetrics=True)
    assert b"halftone_requests_total{" in plain
    assert b"_created" not in plain + openmetrics
    assert openmetrics.endswith(b"# EOF\n")
    names = {family.name for family in parse_openmetrics(openmetrics.decode())}
    assert {"halftone_requests", "halftone_request_duration_seconds", "halftone_queue_rows"} <= names


def test_an_empty_hub_has_an_empty_page() -> None:
    """Before the first push."""
    hub, _ = make_hub()
    assert hub.render() == b""
    assert not hub.is_alive("p")
