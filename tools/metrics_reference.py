"""The metrics that the services declare, the fields of metrics.jsonl, and the tables of both in docs/monitoring.md.

    python -m tools.metrics_reference write     writes the tables anew
    python -m tools.metrics_reference check     says whether they are what the code declares; part of the tests

What tandem_files/metrics_table.py has comes from there. Other metrics are read from the source: two services may use
one name, so none is imported.
"""

import ast
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tandem_files.metrics_table import METRICS

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs" / "monitoring.md"
HEADING = "## Metrics\n\n"

FIELDS = (
    "A field that was not measured in an iteration is null. The held-out evaluation has some of them with `heldout_` "
    "before the name; each reward has `reward/NAME_mean` and `reward/NAME_std`, each set `eval/SET/MEASURE`. "
    "A new field is a row of `tandem_files/metrics_table.py`, and the line that measures it."
)

# Label `job` of a scraped service to the packages whose metrics it serves.
JOBS = {
    "coordinator": ("coordinator", "servicekit", "weightsync"),
    "trainer": ("trainer_service", "servicekit", "weightsync"),
    "rollout": ("rollout_service", "servicekit"),
}
# What Prometheus and its Python client add by themselves.
BUILT_IN = ("up", "process_resident_memory_bytes", "process_cpu_seconds_total")
# What the table says of each service's metrics.
FROM_TABLE = {
    "coordinator": [(metric.exported, metric.help) for metric in METRICS if metric.exported],
    "trainer_service": [(metric.trainer, metric.help) for metric in METRICS if metric.trainer],
}
KINDS = ("Counter", "Gauge", "Histogram", "LateGauge", "Summary")


@dataclass(frozen=True)
class Metric:
    """One declaration."""

    name: str
    kind: str
    help: str
    labels: frozenset[str]

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """The names under which Prometheus stores it, with their labels."""
        sums = {f"{self.name}_sum": self.labels, f"{self.name}_count": self.labels}
        if self.kind == "Histogram":
            return {f"{self.name}_bucket": self.labels | {"le"}, **sums}
        return sums if self.kind == "Summary" else {self.name: self.labels}


def metrics_of(job: str) -> tuple[Metric, ...]:
    """Everything that the service of this `job` declares."""
    return _declared_in(*JOBS[job])


@cache
def _declared_in(*packages: str) -> tuple[Metric, ...]:
    files = [path for package in packages for path in sorted((REPO / package).rglob("*.py"))]
    found = []
    for path in files:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # Neither collections.Counter() nor the Gauge inside LateGauge, which passes its own arguments on.
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
                name = ast.unparse(call.func).rpartition(".")[2]
                kind = name[:1].upper() + name[1:]  # `gauge` is a Gauge with a registry
                found += [_metric(kind, call)] if kind in KINDS else []
    for name, about in (row for package in packages for row in FROM_TABLE.get(package, ())):
        kind = "Counter" if name.endswith("_total") else "Gauge"
        found.append(Metric(name=name, kind=kind, help=about, labels=frozenset()))
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
    """Map the series names of a `job` to their own labels."""
    return {name: labels for metric in metrics_of(job) for name, labels in metric.series.items()} | {
        name: frozenset[str]() for name in BUILT_IN
    }


def reference() -> str:
    """The tables: every metric, by who exports it."""
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
            lines.append(f"| `{metric.name}` | {metric.kind.lower()} | {labels} | {_cell(metric.help)} |")
        lines.append("")
    return "\n".join([*lines, *_fields()])


def _fields() -> list[str]:
    """The table of the fields of metrics.jsonl."""
    lines = ["### Fields of metrics.jsonl", "", FIELDS, "", "| field | unit | on the page | |", "|---|---|---|---|"]
    for metric in METRICS:
        if metric.source in ("run", "trainer"):
            title = _cell(metric.title)
            lines.append(f"| `{metric.name}` | {metric.unit} | {title} | {_cell(metric.help)} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Returns: 0, or 1 if the page is out of date. Raises: SystemExit: wrong usage."""
    if arguments not in (["write"], ["check"]):
        raise SystemExit(__doc__)
    page = PAGE.read_text(encoding="utf-8")
    head, heading, _ = page.partition(HEADING)
    if arguments == ["write"]:
        PAGE.write_text(head + heading + reference(), encoding="utf-8")
    elif page != head + heading + reference():
        print(f"{PAGE.relative_to(REPO)} is not what the code declares: python -m tools.metrics_reference write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
