"""Prometheus metrics of a rollout replica."""

from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Summary

from rollout_service.engine import EngineLoad
from servicekit.buckets import fine_buckets
from servicekit.tracing import exemplar
from tandem_api.weights.v1 import weights_pb2 as pb

_STATES = tuple(name.removeprefix("REPLICA_STATE_").lower() for name in pb.ReplicaState.keys()[1:])
_OUTCOMES = ("committed", "aborted", "poisoned")
# A series per bucket and replica: fine for what has no further labels.
_GENERATE_BUCKETS = fine_buckets(0.01, 3600)
_PAUSE_BUCKETS = fine_buckets(0.001, 300)


class SyncMetrics:
    """Metrics of weight syncs; RolloutMetrics makes them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        summary, histogram = partial(Summary, registry=registry), partial(Histogram, registry=registry)
        # fmt: off
        # Sum and count: the coordinator has the stages' quantiles; here they would be series per replica and stage.
        self.seconds = summary("tandem_weight_sync_seconds",
            "Seconds of each stage of a weight sync, of the slowest rank.", ["stage"])
        self.pause_seconds = histogram("tandem_generation_pause_seconds",
            "Seconds for which a replica that had served refused calls: from closing its gate to opening it again.",
            buckets=_PAUSE_BUCKETS)
        self.bytes = counter("tandem_weight_sync_received_bytes_total", "Bytes that this replica's ranks received.")
        self.bandwidth = gauge("tandem_weight_sync_bandwidth_bytes_per_second",
            "Bytes received by all ranks / seconds of the slowest rank, in the last transfer.")
        self.redundancy = gauge("tandem_weight_sync_redundancy_ratio",
            "Bytes received / bytes of the shards in the last transfer; 1 is perfect.")
        self.staging_bytes = gauge("tandem_weight_sync_staging_bytes",
            "Most bytes that a rank's transfer buffers took in the last transfer.")
        self.epoch = gauge("tandem_weight_sync_epoch", "Epoch of the weight group in the last round.")
        self.outcomes = counter("tandem_weight_sync_outcomes_total",
            "Rounds by how they ended here (committed, aborted, poisoned).", ["outcome"])
        self.verify_failures = counter("tandem_weight_sync_verify_failures_total",
            "Rounds in which a digest was not that of the bytes sent.")
        # fmt: on
        for outcome in _OUTCOMES:
            self.outcomes.labels(outcome)

    def observe_reports(self, reports: Sequence[pb.PhaseReport]) -> None:
        """Record the stages of a phase that was run (not of a repeated answer)."""
        for stage in {stage for report in reports for stage in report.seconds}:
            self.seconds.labels(stage).observe(max(report.seconds[stage] for report in reports))
        received = sum(report.bytes_received for report in reports)
        if received > 0:
            self._observe_transfer(reports, received)

    def observe_pause(self, seconds: float) -> None:
        """Record that the replica accepts calls again, `seconds` after it had stopped."""
        self.pause_seconds.observe(seconds, exemplar())

    def observe_outcome(self, outcome: str, epoch: int) -> None:
        """Count how a round ended (committed, aborted, poisoned), or why it is about to fail (mismatch)."""
        self.epoch.set(epoch)
        if outcome == "mismatch":
            self.verify_failures.inc()
        else:
            self.outcomes.labels(outcome).inc()

    def _observe_transfer(self, reports: Sequence[pb.PhaseReport], received: int) -> None:
        slowest_s = max(report.seconds.get("transfer", 0.0) for report in reports)
        self.bytes.inc(received)
        self.bandwidth.set(received / slowest_s if slowest_s > 0 else 0.0)
        shards = sum(report.shard_bytes for report in reports)
        self.redundancy.set(received / shards if shards > 0 else 0.0)
        self.staging_bytes.set(max(report.staging_bytes for report in reports))


class RolloutMetrics:
    """Metrics of one replica: made once per process; tests pass their own registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        # fmt: off
        self.generated_tokens = counter("tandem_generated_tokens_total", "Completion tokens sampled.")
        self.generate_seconds = histogram("tandem_generate_seconds",
            "Seconds that the engine worked on a generate call.", buckets=_GENERATE_BUCKETS)
        self.running_groups = gauge("tandem_running_groups", "Groups being generated.")
        self.engine_requests = gauge("tandem_engine_requests",
            "Completions in the engine, decoding or waiting for room.")
        self.waiting_requests = gauge("tandem_engine_waiting_requests", "Completions that wait for room in the engine.")
        self.kv_cache_usage = gauge("tandem_kv_cache_usage_ratio", "Share of the engine's KV cache that is in use.")
        self.policy_version = gauge("tandem_policy_version", "Policy version served.")
        self.replica_state = gauge("tandem_replica_state", "1 for the state that the replica is in.", ["state"])
        # fmt: on
        self.sync = SyncMetrics(registry)

    def watch_load(self, load: Callable[[], EngineLoad]) -> None:
        """Call `load` at every scrape for the gauges of the engine's load."""
        self.engine_requests.set_function(lambda: load().requests)
        self.waiting_requests.set_function(lambda: load().waiting_requests)
        self.kv_cache_usage.set_function(lambda: load().kv_cache_usage)

    def observe_state(self, state: pb.ReplicaState.ValueType, policy_version: int) -> None:
        """Export the state (1 for the current one, 0 for the others) and the served version."""
        current = pb.ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower()
        for name in _STATES:
            self.replica_state.labels(name).set(1.0 if name == current else 0.0)
        self.policy_version.set(policy_version)
