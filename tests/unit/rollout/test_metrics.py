from prometheus_client import CollectorRegistry

from rollout_service.metrics import RolloutMetrics
from tandem_api.weights.v1 import weights_pb2 as pb


def test_a_transfer_shows_its_slowest_rank() -> None:
    registry = CollectorRegistry()
    reports = [
        pb.PhaseReport(bytes_received=600, shard_bytes=600, staging_bytes=64, seconds={"transfer": 2.0}),
        pb.PhaseReport(bytes_received=400, shard_bytes=400, staging_bytes=32, seconds={"transfer": 1.0}),
    ]
    metrics = RolloutMetrics(registry)
    metrics.sync.observe_reports(reports)
    metrics.sync.observe_reports([pb.PhaseReport(seconds={"commit": 0.1})])  # no transfer: leaves the figures alone
    found = {
        name: registry.get_sample_value(f"tandem_weight_sync_{name}")
        for name in ("received_bytes_total", "bandwidth_bytes_per_second", "redundancy_ratio", "staging_bytes")
    }
    assert found == {
        "received_bytes_total": 1000.0,
        "bandwidth_bytes_per_second": 500.0,
        "redundancy_ratio": 1.0,
        "staging_bytes": 64.0,
    }
    assert registry.get_sample_value("tandem_weight_sync_seconds_sum", {"stage": "transfer"}) == 2.0


def test_outcomes_are_counted_and_a_mismatch_is_no_outcome() -> None:
    registry = CollectorRegistry()
    metrics = RolloutMetrics(registry)
    metrics.sync.observe_outcome("mismatch", 6)
    metrics.sync.observe_outcome("poisoned", 6)
    metrics.sync.observe_outcome("committed", 7)
    counts = {
        outcome: registry.get_sample_value("tandem_weight_sync_outcomes_total", {"outcome": outcome})
        for outcome in ("committed", "aborted", "poisoned")
    }
    assert counts == {"committed": 1.0, "aborted": 0.0, "poisoned": 1.0}
    assert registry.get_sample_value("tandem_weight_sync_verify_failures_total") == 1.0
    assert registry.get_sample_value("tandem_weight_sync_epoch") == 7.0
