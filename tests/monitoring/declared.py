"""The metrics that the services declare, read from their source: two services may use one name, so none is imported."""

import ast
from dataclasses import dataclass
from functools import cache

from tests.house.repository import calls, parse, python_files

# Label `job` of a scraped service to the packages whose metrics it serves.
JOBS = {
    "coordinator": ("coordinator", "servicekit", "weightsync"),
    "trainer": ("trainer_service", "servicekit", "weightsync"),
    "rollout": ("rollout_service", "servicekit"),
}
# What Prometheus and its Python client add by themselves.
BUILT_IN = ("up", "process_resident_memory_bytes", "process_cpu_seconds_total")
KINDS = ("Counter", "Gauge", "Histogram", "LateGauge")


@dataclass(frozen=True)
class Metric:
    """One declaration."""

    name: str
    kind: str
    labels: frozenset[str]

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """Names and labels under which Prometheus stores it."""
        if self.kind == "Histogram":
            return {
                f"{self.name}_bucket": self.labels | {"le"},
                f"{self.name}_sum": self.labels,
                f"{self.name}_count": self.labels,
            }
        return {self.name: self.labels}


@cache
def metrics_of(job: str) -> tuple[Metric, ...]:
    """Everything that the service of this `job` declares."""
    found = []
    for path in python_files(*JOBS[job]):
        for name, call in calls(parse(path)):
            kind = name.rpartition(".")[2]
            if kind in KINDS and ("prometheus_client" in name or kind == "LateGauge"):
                found.append(_metric(kind, call))
    return tuple(found)


def _metric(kind: str, call: ast.Call) -> Metric:
    labels = next((arg for arg in call.args if isinstance(arg, ast.List)), None)
    return Metric(
        name=ast.literal_eval(call.args[0]),
        kind=kind,
        labels=frozenset(ast.literal_eval(labels)) if labels is not None else frozenset(),
    )


def series_of(job: str) -> dict[str, frozenset[str]]:
    """Series name to its own labels, for one `job`."""
    return {name: labels for metric in metrics_of(job) for name, labels in metric.series.items()} | {
        name: frozenset[str]() for name in BUILT_IN
    }
