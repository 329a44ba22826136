"""FLOPs by hand, the utilisation of a real step, the peak of memory, and the device's speed."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.trainer.reference import NUM_UPDATES, make_samples
from trainer_service.measure.flops import FlopCosts
from trainer_service.measure.meter import measured_flops_per_s
from trainer_service.micro_batches.plan import plan_step
from weightsync.model.spec import ModelSpec

CPU = torch.device("cpu")
SAMPLES = make_samples()
# 4 heads of 2 dimensions, which share 2 keys: 8 columns of queries, 4 of keys, 4 of values.
DENSE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 11,
    "max_position_embeddings": 64,
}
# Its second layer has 4 experts, of which a token chooses 2.
MIXTURE = DENSE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3}
MIXTURE |= {"mlp_only_layers": [0], "norm_topk_prob": True}

# The peaks before, while and after so many bytes are held, and after another restart.
PEAKS = """
import sys
import torch
from trainer_service.measure.meter import peak_bytes, restart_peak
cpu = torch.device("cpu")
restart_peak(cpu)
print(peak_bytes(cpu))
held = torch.ones(int(sys.argv[1]), dtype=torch.uint8)
print(peak_bytes(cpu))
del held
print(peak_bytes(cpu))
restart_peak(cpu)
print(peak_bytes(cpu))
"""


def costs(config: dict[str, Any]) -> FlopCosts:
    return FlopCosts.of(ModelSpec.from_config(config))


def test_costs_of_a_dense_model_with_grouped_heads() -> None:
    # q 6 x 8, k and v 6 x 4 each, output 8 x 6: 144 weights; gate, up and down of 6 x 10 each: 180; 2 FLOPs, 2 layers
    assert costs(DENSE).token == 2 * 2 * (144 + 180)
    # 8 multiplications for the scores of 4 heads, 8 for their values; 2 FLOPs, 2 layers
    assert costs(DENSE).pair == 2 * 2 * 16
    assert costs(DENSE).completion == 2 * 6 * 11


def test_a_token_costs_its_chosen_experts_and_their_router() -> None:
    dense_layer = 144 + 180
    mixture_layer = 144 + 2 * 3 * 6 * 3 + 6 * 4
    assert costs(MIXTURE).token == 2 * (dense_layer + mixture_layer)


def test_a_pass_counts_the_true_lengths_and_completions_only() -> None:
    found = FlopCosts(token=1000.0, pair=10.0, completion=1e6)
    # 3 + 2 tokens: the last is not computed; 4 tokens see 1 + 2 + 3 + 4 keys. 1 + 1: one token that sees itself.
    assert found.forward(np.array([3, 1]), np.array([2, 1])) == 5 * 1000 + (10 + 1) * 10 + 3e6
    assert found.forward(np.array([], np.int64), np.array([], np.int64)) == 0


def test_a_step_needs_what_it_measures_and_three_passes_of_what_it_trains(make_engine: Callable[..., Any]) -> None:
    """Of two updates, one is measured beforehand; with KL in the loss all go through the reference too."""
    engine = make_engine(entropy_coefficient=0.01, epochs=2)
    plan = plan_step(SAMPLES, NUM_UPDATES, engine._config.grpo, engine._ranks)
    ones = FlopCosts(token=1.0, pair=0.0, completion=0.0)
    tokens = SAMPLES.lengths - 1
    trained = int(tokens[SAMPLES.trainable].sum())
    measured = int(tokens.sum() - tokens[SAMPLES.trainable & (SAMPLES.update_index == 0)].sum())
    assert 0 < measured < trained
    assert plan.flops(SAMPLES, ones, epochs=2, reference=True) == measured + 7 * trained
    assert plan.flops(SAMPLES, ones, epochs=1, reference=False) == measured + 3 * trained


def test_a_real_step_reports_its_speed_and_memory(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    result = engine.train_step(SAMPLES, NUM_UPDATES)
    found = result.performance
    seconds = int(SAMPLES.lengths.sum()) / found["train_tokens_per_s"]
    assert sum(result.seconds.values()) <= seconds < 2 * sum(result.seconds.values())
    plan = plan_step(SAMPLES, NUM_UPDATES, engine._config.grpo, engine._ranks)
    flops = plan.flops(SAMPLES, FlopCosts.of(engine.spec), epochs=1, reference=True)
    did = found["model_flops_utilization"] * found["train_peak_flops_per_s"]
    assert did * seconds == pytest.approx(flops)
    assert 0 < found["model_flops_utilization"] < 1
    weights = sum(tensor.nbytes for tensor in engine.tensors().values())
    assert found["train_peak_memory_bytes"] > weights
    assert not set(found) & set(result.metrics)


def test_a_configured_peak_is_of_each_rank(make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    meter = type(engine._runner.meter)(CPU, torch.float32, peak_tflops=0.5, group=engine._agreement.group)
    meter.begin()
    found = meter.metrics(tokens=10, flops=1e12, seconds=4.0)
    assert found["train_peak_flops_per_s"] == 0.5e12
    assert (found["model_flops_utilization"], found["train_tokens_per_s"]) == (0.5, 2.5)


def test_the_peak_of_memory_is_that_since_it_was_restarted() -> None:
    size, blur = 64 * 2**20, 8 * 2**20  # Linux counts pages in batches of each processor
    # a process of its own: in this one, threads and garbage of earlier tests give memory back at any time
    done = subprocess.run([sys.executable, "-c", PEAKS, str(size)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, during, freed, anew = map(int, done.stdout.split())
    assert size - blur <= during - before < 2 * size
    assert freed >= during - blur
    assert anew < during - size / 2


def test_the_measured_speed_is_one_of_a_processor_and_takes_no_random_number() -> None:
    state = torch.random.get_rng_state()
    assert 1e8 < measured_flops_per_s(CPU, torch.float32) < 1e14
    assert torch.equal(torch.random.get_rng_state(), state)
