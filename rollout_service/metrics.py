"""Prometheus metrics of a rollout replica."""

from collections.abc import Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from tandem_api.weights.v1 import weights_pb2 as pb

_STATES = tuple(name.removeprefix("REPLICA_STATE_").lower() for name in pb.ReplicaState.keys()[1:])
_GENERATE_BUCKETS = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3600)
_SYNC_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class RolloutMetrics:
    """Made once per process; tests give a registry of their own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.generated_tokens = Counter(
            "tandem_generated_tokens_total", "Completion tokens sampled.", registry=registry
        )
        self.generate_seconds = Histogram(
            "tandem_generate_seconds",
            "Seconds that the engine worked on a generate call.",
            buckets=_GENERATE_BUCKETS,
            registry=registry,
        )
        self.running_groups = Gauge("tandem_running_groups", "Groups being generated.", registry=registry)
        self.policy_version = Gauge("tandem_policy_version", "Policy version served.", registry=registry)
        self.replica_state = Gauge(
            "tandem_replica_state", "1 for the state that the replica is in.", ["state"], registry=registry
        )
        self.sync_seconds = Histogram(
            "tandem_weight_sync_seconds",
            "Seconds of each stage of a weight sync, of the slowest rank.",
            ["stage"],
            buckets=_SYNC_BUCKETS,
            registry=registry,
        )
        self.sync_bytes = Counter(
            "tandem_weight_sync_received_bytes_total", "Bytes that this replica's ranks received.", registry=registry
        )

    def observe_state(self, state: pb.ReplicaState.ValueType, policy_version: int) -> None:
        """Shows the state as one 1 among zeros."""
        current = pb.ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower()
        for name in _STATES:
            self.replica_state.labels(name).set(1.0 if name == current else 0.0)
        self.policy_version.set(policy_version)

    def observe_reports(self, reports: Sequence[pb.PhaseReport]) -> None:
        """Stages of one phase that was run (not of a repeated answer)."""
        for stage in {stage for report in reports for stage in report.seconds}:
            self.sync_seconds.labels(stage).observe(max(report.seconds[stage] for report in reports))
        self.sync_bytes.inc(sum(report.bytes_received for report in reports))
