"""Observes constants in a service's own histograms, and prints the buckets that it exports then.

    python -m tests.monitoring.quantiles coordinator.watch.metrics 0.45 11

In a process of its own, because two services' metrics do not fit into one. Prints JSON: by histogram and constant, the
cumulative counts by upper bound.
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module

from prometheus_client import CollectorRegistry, Histogram


def histograms_of(module: str) -> Iterator[Histogram]:
    """The histograms that a module of metrics declares, those of a replica with all of its others."""
    loaded = import_module(module)
    if hasattr(loaded, "RolloutMetrics"):
        replica = loaded.RolloutMetrics(CollectorRegistry())
        found = [*vars(replica).values(), *vars(replica.sync).values()]
    else:
        found = list(vars(loaded).values())
    yield from (each for each in found if isinstance(each, Histogram))


def exported(histogram: Histogram, seconds: float) -> dict[str, float]:
    """Observe `seconds` twenty times. Returns: what that has added to the counts, by upper bound."""
    labels = dict.fromkeys(histogram._labelnames, f"constant {seconds}")
    child = histogram.labels(**labels) if labels else histogram
    before = _counts(histogram, labels)
    for _ in range(20):
        child.observe(seconds)
    return {bound: count - before.get(bound, 0.0) for bound, count in _counts(histogram, labels).items()}


def _counts(histogram: Histogram, labels: dict[str, str]) -> dict[str, float]:
    samples = [sample for family in histogram.collect() for sample in family.samples if sample.name.endswith("_bucket")]
    return {each.labels["le"]: each.value for each in samples if labels.items() <= each.labels.items()}


if __name__ == "__main__":
    name, *constants = sys.argv[1:]
    print(
        json.dumps(
            {
                histogram._name: {constant: exported(histogram, float(constant)) for constant in constants}
                for histogram in histograms_of(name)
            }
        )
    )
