"""A page of metrics as Prometheus reads it: sums, histograms and their quantiles."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Page:
    """One scrape."""

    #: Name and labels -> value.
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str) -> Page:
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def since(self, before: Page) -> Page:
        """What was counted since an earlier scrape."""
        return Page({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that carry these labels."""
        return sum(
            value
            for (sample, found), value in self.samples.items()
            if sample == name and labels.items() <= dict(found).items()
        )

    def mean(self, name: str, **labels: str) -> float:
        """Of a histogram's figures."""
        return self.total(f"{name}_sum", **labels) / self.total(f"{name}_count", **labels)

    def histogram_quantile(self, share: float, name: str, **labels: str) -> float:
        """As PromQL's function of that name: linear between the ends of the bucket that it lies in."""
        buckets = sorted(
            (float(dict(found)["le"]), value)
            for (sample, found), value in self.samples.items()
            if sample == f"{name}_bucket" and labels.items() <= dict(found).items()
        )
        rank = share * buckets[-1][1]
        start, below = 0.0, 0.0
        for end, cumulative in buckets:
            if cumulative >= rank:
                return start + (end - start) * (rank - below) / (cumulative - below)
            start, below = end, cumulative
        raise AssertionError("the last bucket holds all")
