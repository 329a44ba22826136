"""What the trainer exports of a weight sync. In a process of its own: two services' metrics do not fit into one."""

import subprocess
import sys

OBSERVED = """
from prometheus_client import REGISTRY
from tandem_api.weights.v1 import weights_pb2 as pb
from trainer_service.metrics import observe_phase

staging = lambda: REGISTRY.get_sample_value("tandem_weight_sync_staging_bytes")
observe_phase(pb.ROUND_PHASE_TRANSFER, [pb.PhaseReport(staging_bytes=size) for size in (5, 64, 7)])
print(staging())
observe_phase(pb.ROUND_PHASE_VERIFY, [pb.PhaseReport()])
print(staging())
"""


def test_the_rank_with_the_largest_buffers_shows_until_the_next_transfer() -> None:
    command = [sys.executable, "-c", OBSERVED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["64.0", "64.0"]
