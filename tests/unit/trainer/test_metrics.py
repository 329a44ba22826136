"""What the trainer exports of a weight sync."""

from prometheus_client import REGISTRY

from tandem_api.weights.v1 import weights_pb2 as pb
from trainer_service import metrics

STAGING = "tandem_weight_sync_staging_bytes"


def test_the_rank_with_the_largest_buffers_shows() -> None:
    reports = [pb.PhaseReport(staging_bytes=size) for size in (5, 64, 7)]
    metrics.observe_phase(pb.ROUND_PHASE_TRANSFER, reports)
    assert REGISTRY.get_sample_value(STAGING) == 64


def test_phases_that_move_nothing_leave_the_last_transfers_figure() -> None:
    metrics.observe_phase(pb.ROUND_PHASE_TRANSFER, [pb.PhaseReport(staging_bytes=64)])
    metrics.observe_phase(pb.ROUND_PHASE_VERIFY, [pb.PhaseReport()])
    assert REGISTRY.get_sample_value(STAGING) == 64
