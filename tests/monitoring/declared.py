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
    help: str
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


def metrics_of(job: str) -> tuple[Metric, ...]:
    """Everything that the service of this `job` declares."""
    return _declared_in(*JOBS[job])


@cache
def _declared_in(*packages: str) -> tuple[Metric, ...]:
    found = []
    for path in python_files(*packages):
        for name, call in calls(parse(path)):
            kind = name.rpartition(".")[2]
            # Neither collections.Counter() nor the Gauge inside LateGauge, which passes its own arguments on.
            if kind in KINDS and call.args and isinstance(call.args[0], ast.Constant):
                found.append(_metric(kind, call))
    return tuple(found)


def _metric(kind: str, call: ast.Call) -> Metric:
    labels = next((arg for arg in call.args if isinstance(arg, ast.List)), None)
    return Metric(
        name=ast.literal_eval(call.args[0]),
        kind=kind.removeprefix("Late"),
        help=ast.literal_eval(call.args[1]),
        labels=frozenset(ast.literal_eval(labels)) if labels is not None else frozenset(),
    )


def series_of(job: str) -> dict[str, frozenset[str]]:
    """Series name to its own labels, for one `job`."""
    return {name: labels for metric in metrics_of(job) for name, labels in metric.series.items()} | {
        name: frozenset[str]() for name in BUILT_IN
    }


def reference() -> str:
    """The tables of docs/monitoring.md: every metric, by who exports it."""
    shared = {metric.name for metric in _declared_in("servicekit", "weightsync")}
    sections = [("Every service", [metric for metric in metrics_of("trainer") if metric.name in shared])]
    sections += [
        (job.capitalize(), [metric for metric in metrics_of(job) if metric.name not in shared]) for job in JOBS
    ]
    lines = []
    for title, metrics in sections:
        lines += [f"### {title}", "", "| metric | type | labels | |", "|---|---|---|---|"]
        for metric in sorted(metrics, key=lambda each: each.name):
            labels = ", ".join(sorted(metric.labels))
            lines.append(
                f"| `{metric.name}` | {metric.kind.lower()} | {labels} | {metric.help.replace('|', chr(92) + '|')} |"
            )
        lines.append("")
    return "\n".join(lines)
