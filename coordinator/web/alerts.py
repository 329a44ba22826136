"""Alerts that the coordinator finds by itself; each has its entry in docs/runbook.md.

Names and thresholds are those of deploy/monitoring/rules. Prometheus also has the past and the other services.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.record.health import Trouble, judged, mean_of
from tandem_files.metrics_file import Heldout
from tandem_files.metrics_table import DISK_FULL, NO_PROGRESS_ITERATIONS, NO_PROGRESS_S

# Iterations over which an iteration's time is averaged.
_AVERAGED = 10


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The figures from which alerts follow."""

    state: str
    error: str
    standstill_s: float  # since a part of an iteration began or ended
    rows: Sequence[Mapping[str, float]]  # iterations, the newest last
    limits: Mapping[str, float]  # health.logprob_limits
    disk_free: float  # share of the run folder's disk
    announced: Sequence[str] = ()  # names of replicas
    serving: Sequence[str] = ()
    poisoned: Sequence[str] = ()  # by their last round
    failed_rounds: int = 0  # among the last ones
    missed_checkpoints: Sequence[str] = ()  # why those since the newest written one were not written
    not_removed: Sequence[str] = ()  # what is left of old files
    heldout: Heldout = field(default_factory=Heldout)


def alerts(now: Conditions) -> list[Trouble]:
    """List the alerts that hold now, the worst first."""
    return [*_of_the_run(now), *_of_the_fleet(now), *judged(now.rows, now.heldout, now.limits)[1]]


def _of_the_run(now: Conditions) -> Iterator[Trouble]:
    if now.state == "failed":
        yield Trouble("run", "TandemRunFailed", f"The run has failed: {now.error}")
    usual_s = mean_of(now.rows[-_AVERAGED:], "iteration_s") or 0.0
    if now.state == "running" and now.standstill_s > max(NO_PROGRESS_S.value, NO_PROGRESS_ITERATIONS.value * usual_s):
        yield Trouble("run", NO_PROGRESS_S.alert, f"No progress for {now.standstill_s / 60:.0f} minutes.")
    for text in now.missed_checkpoints[-1:]:
        yield Trouble("run", "TandemCheckpointsMissed", text)
    for text in now.not_removed:  # what is left of them fills the disk
        yield Trouble("run", DISK_FULL.alert, text)
    if now.disk_free < DISK_FULL.value:
        yield Trouble("run", DISK_FULL.alert, f"{now.disk_free:.1%} of the run folder's disk is free.")


def _of_the_fleet(now: Conditions) -> Iterator[Trouble]:
    for name in now.poisoned:
        yield Trouble("fleet", "TandemReplicaPoisoned", f"{name} holds partly written weights and does not serve.")
    idle = [name for name in now.announced if name not in now.serving and name not in now.poisoned]
    if idle and now.state == "running":
        yield Trouble("fleet", "TandemReplicaNotServing", f"{', '.join(idle)}: announced, but not serving.")
    if now.failed_rounds:
        yield Trouble("fleet", "TandemWeightSyncFailing", f"{now.failed_rounds} of the last rounds were given up.")
