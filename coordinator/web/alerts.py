"""Alerts that the coordinator finds by itself, with the thresholds of deploy/monitoring/rules.

Prometheus also has the past and the other services. The names are those of its alerts, so docs/runbook.md has an entry
for each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.record.health import troubles
from tandem_files.metrics_file import Heldout

NO_PROGRESS_S = 900.0
NO_PROGRESS_ITERATIONS = 3
DISK_FULL = 0.05
# Iterations over which an iteration's time is averaged.
_AVERAGED = 10


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert; `name` is its entry in the runbook, "" if it has none."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The figures from which alerts follow.

    Attributes:
        state: of the run.
        standstill_s: seconds since a part of an iteration began or ended.
        rows: iterations, the newest last.
        announced: names of announced replicas.
        serving: names of serving replicas.
        poisoned: names of replicas that their last round poisoned.
        failed_rounds: number of failed ones among the last rounds.
        disk_free: free share of the run folder's disk.
        missed_checkpoints: why those since the newest written one were not written.
        not_removed: what is left of old files that could not be removed.
    """

    state: str
    error: str
    standstill_s: float
    rows: Sequence[Mapping[str, float]]
    limits: Mapping[str, float]
    announced: Sequence[str]
    serving: Sequence[str]
    poisoned: Sequence[str]
    failed_rounds: int
    disk_free: float
    missed_checkpoints: Sequence[str] = ()
    not_removed: Sequence[str] = ()
    heldout: Heldout = field(default_factory=Heldout)


def alerts(now: Conditions) -> list[Alert]:
    """List the alerts that hold now, the worst first."""
    return [*_of_the_run(now), *_of_the_fleet(now), *_of_the_training(now)]


def _of_the_run(now: Conditions) -> Iterator[Alert]:
    if now.state == "failed":
        yield Alert(name="TandemRunFailed", text=f"The run has failed: {now.error}")
    usual_s = _mean(now.rows, "iteration_s") or 0.0
    if now.state == "running" and now.standstill_s > max(NO_PROGRESS_S, NO_PROGRESS_ITERATIONS * usual_s):
        yield Alert(name="TandemNoProgress", text=f"No progress for {now.standstill_s / 60:.0f} minutes.")
    for text in now.missed_checkpoints[-1:]:
        yield Alert(name="TandemCheckpointsMissed", text=text)
    for text in now.not_removed:  # what is left of them fills the disk
        yield Alert(name="TandemDiskFull", text=text)
    if now.disk_free < DISK_FULL:
        yield Alert(name="TandemDiskFull", text=f"{now.disk_free:.1%} of the run folder's disk is free.")


def _of_the_fleet(now: Conditions) -> Iterator[Alert]:
    for name in now.poisoned:
        yield Alert(name="TandemReplicaPoisoned", text=f"{name} holds partly written weights and does not serve.")
    idle = [name for name in now.announced if name not in now.serving and name not in now.poisoned]
    if idle and now.state == "running":
        yield Alert(name="TandemReplicaNotServing", text=f"{', '.join(idle)}: announced, but not serving.")
    if now.failed_rounds:
        yield Alert(name="TandemWeightSyncFailing", text=f"{now.failed_rounds} of the last rounds were given up.")


def _of_the_training(now: Conditions) -> Iterator[Alert]:
    for trouble in troubles(now.rows, now.heldout, now.limits):
        yield Alert(name=trouble.name, text=trouble.text)


def _mean(rows: Sequence[Mapping[str, float]], field: str) -> float | None:
    """Average a field over the newest iterations; None if none has it."""
    values = [row[field] for row in rows[-_AVERAGED:] if field in row]
    return sum(values) / len(values) if values else None
