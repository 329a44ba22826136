"""The planner at the sizes that it is made for, and how its cost grows. No absolute times: they belong to machines."""

import json
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest

from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import preset
from weightsync.plans.plan import make_plan

pytestmark = pytest.mark.integration

GIB = 2**30
SLOW = pytest.mark.slow
# model, trainer, rollout, replicas, trainer ranks, rollout ranks, GiB of memory allowed
LARGE = [
    ("qwen3-235b-a22b", "tp=4,pp=8,ep=16,dp=16,embedding=1,loss=1", "tp=8", 64, 512, 512, 4),
    pytest.param("deepseek-v3-sized", "tp=4,pp=16,ep=64,dp=16", "tp=16,ep=16", 64, 1024, 1024, 8, marks=SLOW),
    ("deepseek-v3-sized", "tp=8,pp=8,ep=32,dp=16", "tp=32", 32, 1024, 1024, 8),
]


def plan(*arguments: str) -> dict[str, Any]:
    """`tandem plan --json` in a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "launcher", "plan", "--json", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, timeout=120)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@pytest.mark.parametrize(("model", "trainer", "rollout", "replicas", "senders", "receivers", "gib"), LARGE)
def test_thousands_of_ranks_fit_in_a_laptop(
    model: str, trainer: str, rollout: str, replicas: int, senders: int, receivers: int, gib: int
) -> None:
    sizes = ("--model", model, "--trainer", trainer, "--rollout", rollout, "--replicas", str(replicas))
    figures = plan(*sizes)
    assert (figures["trainer_ranks"], figures["rollout_ranks"]) == (senders, receivers)
    assert figures["redundancy"] == 1.0
    assert figures["sender_imbalance"] <= 1.10
    assert figures["peak_rss_bytes"] <= gib * GIB
    assert figures["staging_bytes_per_rank"] <= 2 * 256 * 2**20


def test_the_same_plan_in_every_process() -> None:
    sizes = ("--model", "qwen3-30b-a3b", "--trainer", "tp=4,pp=4,ep=16,dp=16", "--rollout", "tp=4,ep=4")
    assert plan(*sizes)["plan_digest"] == plan(*sizes)["plan_digest"]


def _seconds(layers: int, data: int) -> float:
    """Median of three plans of a mixture of experts with 16 x `data` trainer ranks."""
    import dataclasses

    spec = dataclasses.replace(preset("qwen3-235b-a22b"), num_layers=layers)
    trainer = Parallel(tensor=4, pipeline=4, data=data, expert=16)
    taken = []
    for _ in range(3):
        start = time.process_time()
        make_plan(megatron_layout(spec, trainer), sglang_layout(spec, Parallel(tensor=8)))
        taken.append(time.process_time() - start)
    return statistics.median(taken)


@pytest.mark.alone
def test_growth_is_close_to_linear_in_ranks_x_tensors() -> None:
    base = _seconds(layers=8, data=4)
    # Four times the tensors, and four times the ranks: linear is 4, quadratic would be 16.
    assert _seconds(layers=32, data=4) < 8 * base
    assert _seconds(layers=8, data=16) < 8 * base
