"""The page is, byte for byte, what prometheus_client writes."""

from collections.abc import Iterable, Iterator

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ClientExemplar

from serving.observe.page import PageWriter
from serving.observe.snapshot import Exemplar, Family


class Families(Collector):
    """Families, as the exposition code of prometheus_client wants them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        """One metric for each."""
        for family in self._families:
            metric = Metric(family.name, family.documentation, family.type)
            for key, value in family.samples.items():
                name, labels = key
                metric.add_sample(name, dict(labels), value, exemplar=_for_client(family.exemplars.get(key)))
            yield metric


def _for_client(exemplar: Exemplar | None) -> ClientExemplar | None:
    if exemplar is None:
        return None
    return ClientExemplar(dict(exemplar.labels), exemplar.value, exemplar.timestamp_s)


NAMES = st.from_regex(r"[a-z][a-z_]{0,8}[a-z]", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
LABELS = st.dictionaries(NAMES, TEXTS, max_size=3).map(lambda labels: tuple(sorted(labels.items())))
VALUES = st.one_of(st.floats(), st.integers(0, 2**53).map(float))


@st.composite
def families(draw: st.DrawFn) -> Family:
    """Any family; a counter's and a histogram's samples may have exemplars."""
    name, kind = draw(NAMES), draw(st.sampled_from(["counter", "gauge", "histogram"]))
    suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}[kind]
    samples = {
        (name + suffix, labels): value
        for labels, value in draw(st.dictionaries(LABELS, VALUES, max_size=4)).items()
    }
    exemplar = Exemplar((("request_id", draw(TEXTS)),), draw(st.floats(0, 10)), draw(st.floats(0, 2e9)))
    exemplars = {key: exemplar for key in samples if kind != "gauge" and draw(st.booleans())}
    return Family(name, kind, draw(TEXTS), samples, exemplars)


def registry(some: list[Family]) -> CollectorRegistry:
    """The same families for prometheus_client."""
    found = CollectorRegistry(auto_describe=False)
    found.register(Families(some))
    return found


@given(st.lists(families(), max_size=4, unique_by=lambda family: family.name))
def test_the_page_is_that_of_prometheus_client(some: list[Family]) -> None:
    """In both formats, and a second time from what the writer remembers."""
    writer = PageWriter()
    for _ in range(2):
        assert writer.write(some) == generate_latest(registry(some))
        assert writer.write(some, openmetrics=True) == generate_openmetrics(registry(some))


def test_exemplars_are_for_openmetrics_only() -> None:
    """With the request's id, and the value that the bucket counted."""
    key = ("seconds_bucket", (("le", "+Inf"),))
    exemplar = Exemplar((("request_id", "abc"),), 0.25, 1.5e9)
    family = Family("seconds", "histogram", "Time.", {key: 1.0}, {key: exemplar})
    assert b"abc" not in PageWriter().write([family])
    page = PageWriter().write([family], openmetrics=True).decode()
    (found,) = text_string_to_metric_families(page)
    assert found.samples[0].exemplar is not None
    assert found.samples[0].exemplar.labels == {"request_id": "abc"}
    assert found.samples[0].exemplar.value == 0.25
