"""Merges the ranks' reports of a weight-sync round into its figures. Pure but for the wire types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from servicekit.errors import DigestMismatch, Internal, TandemError
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import ReplicaOutcome, SyncResult
from weightsync.round.phases import STAGES

Reports = Sequence[weights_pb2.PhaseReport]


@dataclass
class RoundReports:
    """Collects the reports of a round, by participant and rank."""

    _stages: dict[str, float] = field(default_factory=dict)
    _seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    _received: dict[tuple[str, int], int] = field(default_factory=dict)
    _shards: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, reports: Mapping[str, Reports]) -> None:
        """Add the seconds of one phase; `reports` is by participant.

        A stage lasts from when the last participant had done the stage before until the last one has done it. So the
        stages of a phase take no longer than the phase, whichever participant is slow where.
        """
        by_rank = {
            (name, rank): dict(report.seconds) for name, ranks in reports.items() for rank, report in enumerate(ranks)
        }
        done_s, before_s = dict.fromkeys(by_rank, 0.0), 0.0
        for stage in STAGES:
            if any(stage in seconds for seconds in by_rank.values()):
                done_s = {key: done_s[key] + seconds.get(stage, 0.0) for key, seconds in by_rank.items()}
                latest_s = max(done_s.values())
                self._stages[stage] = self._stages.get(stage, 0.0) + latest_s - before_s
                before_s = latest_s
        for key, seconds in by_rank.items():
            self._seconds[key] = self._seconds.get(key, 0.0) + sum(seconds.values())

    def merge(self, other: "RoundReports") -> None:
        """Add another round of the same publication."""
        for stage, seconds in other._stages.items():
            self._stages[stage] = self._stages.get(stage, 0.0) + seconds
        for key, seconds in other._seconds.items():
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._received |= other._received
        self._shards |= other._shards

    def check_plans(self, reports: Mapping[str, Reports], trainer: str) -> dict[str, TandemError]:
        """Check that every rank made the same plan as the trainer's first one.

        Returns: for each participant that did not, an Internal that names two ranks that differ.
        """
        expected = reports[trainer][0].plan_digest
        wrong: dict[str, TandemError] = {}
        for name, ranks in reports.items():
            for rank, report in enumerate(ranks):
                if report.plan_digest != expected:
                    wrong[name] = Internal(
                        f"{name} rank {rank} made transfer plan {report.plan_digest or '(none)'}, "
                        f"but {trainer} rank 0 made {expected or '(none)'}: they read the round differently"
                    )
        return wrong

    def check_bytes(self, reports: Mapping[str, Reports]) -> dict[str, TandemError]:
        """Check that every rollout rank received exactly the bytes of its shard.

        Args:
            reports: TRANSFER reports of the rollouts.
        Returns: for each one that did not, a DigestMismatch that names the rank.
        """
        wrong: dict[str, TandemError] = {}
        for name, ranks in reports.items():
            for rank, report in enumerate(ranks):
                self._received[name, rank] = report.bytes_received
                self._shards[name, rank] = report.shard_bytes
                if report.bytes_received != report.shard_bytes:
                    wrong[name] = DigestMismatch(
                        f"{name} rank {rank} received {report.bytes_received} bytes for a shard of {report.shard_bytes}"
                    )
        return wrong

    def result(
        self,
        *,
        policy_version: int,
        attempts: int,
        total_s: float,
        outside_s: Mapping[str, float],
        outcomes: Mapping[str, ReplicaOutcome],
        epoch: int,
        source: str = "",
    ) -> SyncResult:
        """Sum up the rounds that have committed.

        Args:
            total_s: seconds of the whole publication.
            outside_s: seconds of it that were spent outside of these rounds, by stage.
            source: the replica that has sent; "": the trainer.
        """
        stages = {**outside_s, **self._stages}
        stages["other"] = max(0.0, total_s - sum(stages.values()))
        received, shards = sum(self._received.values()), sum(self._shards.values())
        replica_s: dict[str, float] = {}
        for (name, rank), seconds in self._seconds.items():
            if (name, rank) in self._received:  # not the trainer
                replica_s[name] = max(replica_s.get(name, 0.0), seconds)
        return SyncResult(
            policy_version=policy_version,
            attempts=attempts,
            total_s=total_s,
            stages=stages,
            bytes_per_rollout_rank=max(self._received.values(), default=0),
            bytes_received=received,
            redundancy=received / shards if shards else 0.0,
            outcomes=dict(outcomes),
            epoch=epoch,
            replica_s=replica_s,
            source=source,
        )
