"""What the trainer exports of a weight sync and of a train step.

In a process of its own: two services' metrics do not fit into one.
"""

import json
import subprocess
import sys

from tandem_files.metrics_file import STEP_PARTS

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
STEP = """
import json, sys
from prometheus_client import REGISTRY
from trainer_service.metrics import observe_step

metrics, seconds, gauges = map(json.loads, sys.argv[1:])
observe_step(metrics, seconds, 7)
part = lambda name: REGISTRY.get_sample_value("tandem_train_step_seconds_sum", {"part": name})
print(json.dumps([{name: REGISTRY.get_sample_value(name) for name in gauges}, {name: part(name) for name in seconds}]))
"""
# Other fields that a step reports.
FURTHER = (
    *("samples", "tokens", "skipped_updates", "grad_norm", "loss", "entropy", "kl_old", "clip_fraction_low"),
    *("clip_fraction_high", "logprob_abs_diff_mean", "logprob_abs_diff_max"),
)
# Field of a step's metrics to its gauge, and a value that no other has.
SPEED = {
    "packing_efficiency": ("tandem_packing_efficiency_ratio", 0.75),
    "prompt_sharing": ("tandem_prompt_sharing_ratio", 0.5),
    "train_tokens_per_s": ("tandem_train_tokens_per_second", 1000.0),
    "model_flops_utilization": ("tandem_train_model_flops_utilization_ratio", 0.25),
    "train_peak_flops_per_s": ("tandem_train_peak_flops_per_second", 2e12),
    "train_peak_memory_bytes": ("tandem_train_peak_memory_bytes", 4096.0),
}


def printed(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(json.dumps, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_rank_with_the_largest_buffers_shows_until_the_next_transfer() -> None:
    assert printed(OBSERVED).split() == ["64.0", "64.0"]


def test_each_gauge_of_a_step_has_its_own_field() -> None:
    metrics = dict.fromkeys(FURTHER, 9.0) | {field: value for field, (_, value) in SPEED.items()}
    seconds = {part: 0.5 + place for place, part in enumerate(STEP_PARTS)}
    expected = dict(SPEED.values())
    assert json.loads(printed(STEP, metrics, seconds, list(expected))) == [expected, seconds]
