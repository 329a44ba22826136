"""The arithmetic of `tandem check` against Megatron itself, made and run forward on fake CUDA tensors."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.check.memory_budget import trainer_memory
from tests.cuda.megatron_memory import configuration
from weightsync.model.spec import ModelSpec

DENSE = {
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TIED = {**DENSE, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
TIED |= {"tie_word_embeddings": True, "vocab_size": 151936}
QWEN3 = {**DENSE, "model_type": "qwen3", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}


@dataclass(frozen=True)
class Case:
    """A model, the trainer's settings, the parameters' type, and the share of the first rank's tokens with a loss."""

    model: dict[str, Any]
    trainer: dict[str, Any]
    dtype: str = "bfloat16"
    completion_share: float = 7 / 8


CASES = {
    "7B, TP4 DP2 SP": Case(DENSE, {"tensor_parallel": 4, "data_parallel": 2, "sequence_parallel": True}),
    "1.5B, TP2, tied": Case(TIED, {"tensor_parallel": 2}),
    # the prompts' columns are all of the first rank
    "7B, TP2 CP2 SP": Case(
        DENSE, {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True}, completion_share=3 / 4
    ),
    "Qwen3, CP2": Case(QWEN3, {"tensor_parallel": 2, "context_parallel": 2}, completion_share=3 / 4),
    "Qwen3, CP2, float32": Case(QWEN3, {"tensor_parallel": 2, "context_parallel": 2}, "float32", 3 / 4),
    "Qwen3, one rank, float32": Case(QWEN3, {}, "float32"),
}


def measure(case: dict[str, Any]) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.cuda.megatron_memory", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_arithmetic_equals_megatron(name: str, tmp_path: Path) -> None:
    case = vars(CASES[name]) | {"trainer": CASES[name].trainer | {"max_tokens_per_micro_batch": 8192}}
    measured = measure(case)
    spec = ModelSpec.from_config(CASES[name].model)
    (counted,) = trainer_memory(configuration(case, tmp_path), spec, completion_share=CASES[name].completion_share)
    assert counted.resident == pytest.approx(measured["resident"], rel=0.005)
    assert counted.forward == pytest.approx(measured["peak"], rel=0.02)


UNDO = {"updates_per_iteration": 4}
REFRESHED = UNDO | {"kl_coefficient": 0.1, "reference_refresh_every": 4}
HOSTS = {
    "7B, TP4 DP2": (DENSE, {"tensor_parallel": 4, "data_parallel": 2, "sequence_parallel": True}, UNDO),
    "7B, TP4, offload, reference": (DENSE, {"tensor_parallel": 4, "offload": {"optimizer": True}}, REFRESHED),
    "7B, TP2 DP2, ZeRO-1, offload": (
        DENSE,
        {"tensor_parallel": 2, "data_parallel": 2, "distributed_optimizer": True}
        | {"offload": {"parameters": True, "gradients": True, "optimizer": True}},
        REFRESHED,
    ),
    "1.5B, float32": (TIED, {}, UNDO),
}


@pytest.mark.parametrize("name", HOSTS)
def test_page_locked_memory_is_what_is_counted(name: str, tmp_path: Path) -> None:
    model, trainer, grpo = HOSTS[name]
    case = {"model": model, "trainer": trainer, "grpo": grpo, "dtype": "float32" if "float32" in name else "bfloat16"}
    measured = measure(case)
    (counted,) = trainer_memory(configuration(case, tmp_path), ModelSpec.from_config(model))
    assert counted.host == pytest.approx(measured["host"], rel=0.05)
    assert sum(counted.saved) == pytest.approx(measured["saved"], rel=0.05)
