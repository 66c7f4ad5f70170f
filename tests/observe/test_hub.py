"""The merged page: no total falls, dead gauges vanish, any label value is escaped."""

import math
from collections import Counter as Tally
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from serving.observe.hub import MAX_DEAD_PROCESSES, Hub, take_snapshot
from serving.observe.metrics import GatewayMetrics

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
    """Processes that work, push, stall, return, die and are replaced, and what ought to be counted."""

    TIERS = st.sampled_from(["fp32", "fp16"])

    def __init__(self) -> None:
        super().__init__()
        self.hub, self.clock = make_hub()
        self.processes: list[Process] = []
        self.pushed_s: dict[str, float] = {}
        self.pushed_done: Tally[tuple[str, str]] = Tally()
        self.pushed_queue: dict[tuple[str, str], float] = {}
        self.before: dict[tuple[str, str], float] = {}

    @rule()
    def start(self) -> None:
        """A process starts, or one that died starts again under another name."""
        self.processes.append(Process(f"p{len(self.processes)}"))

    @rule(data=st.data(), tier=TIERS, amount=st.integers(0, 20))
    def work(self, data: st.DataObject, tier: str, amount: int) -> None:
        """Any process counts; the hub hears of it with the next push."""
        if self.processes:
            data.draw(st.sampled_from(self.processes)).work(tier, amount)

    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        """Any process pushes, however long it was silent."""
        if not self.processes:
            return
        process = data.draw(st.sampled_from(self.processes))
        self.hub.push(process.name, take_snapshot(process.registry))
        self.pushed_s[process.name] = self.clock.now_s
        for tier in ("fp32", "fp16"):
            key = (process.name, tier)
            self.pushed_done[key] = process.registry.get_sample_value("done_total", {"tier": tier}) or 0
            self.pushed_queue[key] = process.registry.get_sample_value("queue", {"tier": tier}) or 0

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        """Time goes by; who did not push in it is dead until it does."""
        self.clock.now_s += seconds

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


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=40, stateful_step_count=25)


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
        metrics.request_duration.labels("m", tier).observe(0.01)
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
