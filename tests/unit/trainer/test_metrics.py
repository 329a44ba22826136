"""What the trainer exports of weight syncs and train steps.

In a process of its own: two services' metrics do not fit into one.
"""

import json
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

# Gauges by the metric of a step that each shows, written out: one that shows another metric must fail.
SHOWN = {
    "train_tokens_per_s": "tandem_train_tokens_per_second",
    "model_flops_utilization": "tandem_train_model_flops_utilization_ratio",
    "train_peak_flops_per_s": "tandem_train_peak_flops_per_second",
    "train_peak_memory_bytes": "tandem_train_peak_memory_bytes",
    "packing_efficiency": "tandem_packing_efficiency_ratio",
    "prompt_sharing": "tandem_prompt_sharing_ratio",
    "grad_norm": "tandem_grad_norm",
    "loss": "tandem_loss",
    "entropy": "tandem_entropy",
    "kl_old": "tandem_kl_old",
    "clip_fraction_low": 'tandem_clip_fraction{bound="low"}',
    "clip_fraction_high": 'tandem_clip_fraction{bound="high"}',
    "logprob_abs_diff_mean": 'tandem_logprob_abs_diff{statistic="mean"}',
    "logprob_abs_diff_p999": 'tandem_logprob_abs_diff{statistic="p999"}',
    "logprob_abs_diff_max": 'tandem_logprob_abs_diff{statistic="max"}',
}
COUNTED = {
    "tokens": "tandem_train_tokens_total",
    "samples": "tandem_train_samples_total",
    "skipped_updates": "tandem_train_skipped_updates_total",
    "engine_logprobs_not_finite": "tandem_train_engine_logprobs_not_finite_total",
}
PARTS = ("receive", "onload", "pack", "old_logprobs", "reference", "forward_backward", "optimizer", "offload", "total")
STEPS = """
import json, sys
from prometheus_client import generate_latest
from trainer_service.metrics import observe_step

for number, (metrics, seconds) in enumerate(json.load(sys.stdin)):
    observe_step(metrics, seconds, 6 + number)
print(generate_latest().decode())
"""


def step(first: float) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics and seconds of a step, each another number."""
    metrics = {name: first + place for place, name in enumerate((*SHOWN, *COUNTED))}
    return metrics, {part: first / 64 + place for place, part in enumerate(PARTS)}


def run(script: str, given: str = "") -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_last_step_s_values_and_all_steps_seconds_by_part_are_exported() -> None:
    (before, begun), (last, seconds) = steps = (step(100.5), step(1000.5))
    lines = run(STEPS, json.dumps(steps)).splitlines()
    served = {
        name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))
    }
    assert {name: served.get(series) for name, series in SHOWN.items()} == {name: last[name] for name in SHOWN}
    sums = {part: served.get(f'tandem_train_step_seconds_sum{{part="{part}"}}') for part in PARTS}
    assert sums == {part: begun[part] + seconds[part] for part in PARTS}
    assert {served[f'tandem_train_step_seconds_count{{part="{part}"}}'] for part in PARTS} == {2}
    assert {name: served.get(series) for name, series in COUNTED.items()} == {
        name: before[name] + last[name] for name in COUNTED
    }
    assert (served["tandem_policy_version"], served['tandem_train_steps_total{result="ok"}']) == (7, 2)


def test_the_rank_with_the_largest_buffers_shows_until_the_next_transfer() -> None:
    assert run(OBSERVED).split() == ["64.0", "64.0"]
