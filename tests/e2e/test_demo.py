"""The demos do what the README says: they learn, engine and trainer agree, and the folder left is the policy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from examples.calculator.make_model import accuracy
from examples.calculator.problems import split_questions
from tests.e2e.conftest import EXAMPLE, Tandem, rows_of, summary_of

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(900)]
ROW_KEYS = {
    "reward_mean",
    "heldout_accuracy",
    "response_length_mean",
    "entropy",
    "logprob_abs_diff_max",
    "tokens_per_s",
    "train_tokens_per_s",
    "train_peak_memory_bytes",
    "train_forward_backward_s",
}
SUMMARY_KEYS = {
    "iterations",
    "initial_accuracy",
    "final_accuracy",
    "wall_s",
    "generated_tokens",
    "trained_samples",
    "policy_version",
    "weight_sync",
    "logprob_abs_diff_max",
    "versions",
}


@pytest.mark.runs("make demo")
def test_the_demo_learns_to_add(tandem: Callable[..., Tandem], tmp_path: Path) -> None:
    run = tandem("demo")
    assert run.wait_end(500) == 0, run.output()
    run.assert_nothing_left()
    folder = tmp_path / "runs" / "arithmetic"
    summary = summary_of(folder)
    assert set(summary) >= SUMMARY_KEYS
    assert set(summary["versions"]) >= {"torch", "sglang", "megatron_core"}
    assert summary["initial_accuracy"] < 0.35
    assert summary["final_accuracy"] >= 0.95
    # After every sync: the same tokens, the same log-probs in SGLang and in Megatron.
    assert all(row["logprob_abs_diff_max"] <= 1e-4 for row in rows_of(folder))
    assert summary["logprob_abs_diff_max"] <= 1e-4
    assert summary["weight_sync"]["redundancy"] == 1.0
    assert summary["weight_sync"]["count"] == 41
    assert all(set(row) >= ROW_KEYS for row in rows_of(folder))
    assert all(0 < row["model_flops_utilization"] < 1 for row in rows_of(folder))
    # Where an iteration's time goes is measured; that Tandem adds at most 15 % is a ratio, so it may be asserted.
    assert summary["time"]["overhead_share_median"] <= 0.15
    assert abs(transformers_accuracy(folder / "hf") - summary["final_accuracy"]) <= 0.004  # two of 500 near-ties


@pytest.mark.slow
@pytest.mark.runs("make demo-env")
def test_the_calculator_example_learns_to_use_its_tool(tandem: Callable[..., Tandem], tmp_path: Path) -> None:
    run = tandem("run", "-c", str(EXAMPLE.parent.parent / "calculator" / "calculator.yaml"))
    assert run.wait_end(800) == 0, run.output()
    run.assert_nothing_left()
    folder = tmp_path / "runs" / "calculator"
    summary = summary_of(folder)
    assert summary["initial_accuracy"] <= 0.3
    assert summary["final_accuracy"] >= 0.9
    # Also of tokens that follow a tool's answer.
    assert summary["logprob_abs_diff_max"] <= 1e-4
    assert summary["weight_sync"]["redundancy"] == 1.0
    # The same episodes, with the tool called here.
    exported = accuracy(Qwen3ForCausalLM.from_pretrained(folder / "hf"), split_questions()[1])
    assert abs(exported - summary["final_accuracy"]) <= 0.004


def transformers_accuracy(folder: Path) -> float:
    """Greedy held-out accuracy of a Hugging Face folder: exactly the answer, then the end token."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    heldout = (EXAMPLE.parent / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in heldout]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=4)
    texts = tokenizer.batch_decode(out[:, prompts.shape[1] :])
    right: list[bool] = [
        text.replace("<pad>", "") == row["answer"] + "<eos>" for text, row in zip(texts, rows, strict=True)
    ]
    return sum(right) / len(right)
