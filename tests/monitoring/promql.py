"""Selectors of PromQL expressions, as far as our rules and dashboards use the language."""

import re
from dataclasses import dataclass

_SELECTOR = re.compile(r"(?<![\w:.$\"])([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?(?=\s*(\(?))")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
# Recording rules have a colon, metrics of ours a prefix; everything else is a function, an operator or a label.
_OURS = re.compile(
    r"^(tandem_\w+|tandem:[\w:]+|up|process_resident_memory_bytes|process_cpu_seconds_total|ALERTS|kube_\w+)$"
)
# Of kube-state-metrics, by its documentation (docs/metrics: job, service, statefulset); all have a namespace.
KUBE_STATE_METRICS = {
    "kube_job_complete": {"job_name", "condition"},
    "kube_job_failed": {"job_name", "condition"},
    "kube_service_info": {"service"},
    "kube_statefulset_replicas": {"statefulset"},
    "kube_statefulset_status_replicas_ready": {"statefulset"},
}


@dataclass(frozen=True)
class Selector:
    """`name{label="value"}`; matchers by label, as (operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def value(self, label: str) -> tuple[str, str] | None:
        """Operator and value of the matcher for a label."""
        return next(((operator, value) for name, operator, value in self.matchers if name == label), None)


def selectors(expression: str) -> list[Selector]:
    """Every selector of ours in an expression, in order.

    >>> [s.name for s in selectors('sum by (stage) (rate(tandem_a_total{job="x"}[5m])) / on (up) tandem:b:mean')]
    ['tandem_a_total', 'tandem:b:mean']
    """
    found = []
    for match in _SELECTOR.finditer(_GROUPING.sub(" ", expression)):
        name, matchers = match.group(1), match.group(2) or ""
        if _OURS.match(name):
            found.append(Selector(name, tuple(_MATCHER.findall(matchers))))
    return found


def problems(expression: str, series: dict[str, dict[str, frozenset[str]]], recorded: set[str]) -> list[str]:
    """What an expression asks for that nobody exports.

    Args:
        series: by `job`, the labels of each series.
        recorded: names of the recording rules.
    """
    found = []
    for selector in selectors(expression):
        if ":" in selector.name:
            found += [] if selector.name in recorded else [f"no recording rule {selector.name}"]
            continue
        if selector.name.startswith("kube_"):
            found += _unknown(selector)
            continue
        if selector.name == "ALERTS":
            continue
        wanted = selector.value("job")
        jobs = [job for job in series if wanted is None or _matches(wanted, job)]
        having = [series[job][selector.name] for job in jobs if selector.name in series[job]]
        if not having or (wanted is not None and len(having) < len(jobs)):
            found.append(f"{selector.name} is not exported by {', '.join(jobs) or wanted}")
            continue
        for label, _, _ in selector.matchers:
            if label not in TARGET_LABELS and not any(label in labels for labels in having):
                found.append(f"{selector.name} has no label {label}")
    return found


# What the scrape adds.
TARGET_LABELS = {"job", "instance", "namespace", "pod", "replica", "tandem_run_id"}


def _unknown(selector: Selector) -> list[str]:
    """What kube-state-metrics does not have of a selector."""
    labels = KUBE_STATE_METRICS.get(selector.name)
    if labels is None:
        return [f"kube-state-metrics has no {selector.name}"]
    asked = {label for label, _, _ in selector.matchers} - {"namespace"}
    return [f"{selector.name} has no label {label}" for label in sorted(asked - labels)]


def _matches(matcher: tuple[str, str], value: str) -> bool:
    operator, pattern = matcher
    if "$" in pattern:
        return True
    if operator in ("=", "!="):
        return (value == pattern) == (operator == "=")
    return (re.fullmatch(pattern, value) is not None) == (operator == "=~")
