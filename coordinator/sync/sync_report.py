"""Merges the ranks' reports of a weight-sync round into its figures. Pure but for the wire types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.flow import ReplicaOutcome, SyncResult
from servicekit.errors import DigestMismatch, Internal
from tandem_api.weights.v1 import weights_pb2

Reports = Sequence[weights_pb2.PhaseReport]


@dataclass
class RoundReports:
    """Collects the reports of a round, by participant and rank."""

    _seconds: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    _received: dict[tuple[str, int], int] = field(default_factory=dict)
    _shards: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, reports: Mapping[str, Reports]) -> None:
        """Add the seconds of one phase; `reports` is by participant."""
        for name, ranks in reports.items():
            for rank, report in enumerate(ranks):
                stages = self._seconds.setdefault((name, rank), {})
                for stage, seconds in report.seconds.items():
                    stages[stage] = stages.get(stage, 0.0) + seconds

    def merge(self, other: "RoundReports") -> None:
        """Add another round of the same publication."""
        for key, stages in other._seconds.items():
            mine = self._seconds.setdefault(key, {})
            for stage, seconds in stages.items():
                mine[stage] = mine.get(stage, 0.0) + seconds
        self._received |= other._received
        self._shards |= other._shards

    def check_plans(self, reports: Mapping[str, Reports]) -> None:
        """Check that every rank made the same plan.

        Raises: Internal: names two ranks that differ.
        """
        digests = {(name, rank): r.plan_digest for name, ranks in reports.items() for rank, r in enumerate(ranks)}
        (first, expected), *others = digests.items()
        for (name, rank), digest in others:
            if digest != expected:
                raise Internal(
                    f"{name} rank {rank} made transfer plan {digest or '(none)'}, "
                    f"but {first[0]} rank {first[1]} made {expected or '(none)'}: they read the round differently"
                )

    def check_bytes(self, reports: Mapping[str, Reports]) -> None:
        """Check that every rollout rank received exactly the bytes of its shard.

        Args:
            reports: TRANSFER reports of the rollouts.
        Raises: DigestMismatch: names the rank.
        """
        for name, ranks in reports.items():
            for rank, report in enumerate(ranks):
                self._received[name, rank] = report.bytes_received
                self._shards[name, rank] = report.shard_bytes
                if report.bytes_received != report.shard_bytes:
                    raise DigestMismatch(
                        f"{name} rank {rank} received {report.bytes_received} bytes for a shard of {report.shard_bytes}"
                    )

    def result(
        self, *, policy_version: int, attempts: int, total_s: float, outcomes: Mapping[str, ReplicaOutcome], epoch: int
    ) -> SyncResult:
        """Sum up the rounds that have committed."""
        stages: dict[str, float] = {}
        for seconds_by_stage in self._seconds.values():
            for stage, seconds in seconds_by_stage.items():
                stages[stage] = max(stages.get(stage, 0.0), seconds)
        received, shards = sum(self._received.values()), sum(self._shards.values())
        replica_s: dict[str, float] = {}
        for (name, rank), seconds_by_stage in self._seconds.items():
            if (name, rank) in self._received:  # not the trainer
                replica_s[name] = max(replica_s.get(name, 0.0), sum(seconds_by_stage.values()))
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
        )
