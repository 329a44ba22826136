"""The arithmetic of `tandem check` against the bytes that a real step's tensors hold, on a CPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.check.memory_budget import trainer_memory
from tandem_config.schema import RunConfig
from tests.unit.trainer.live_bytes import LiveBytes
from trainer_service.micro_batches.samples import Samples
from weightsync.model.spec import ModelSpec

CPU = torch.device("cpu")
# of each sample; its last token is not computed, so that four of them are a full micro-batch
PROMPT, COMPLETION, NUM = 33, 224, 4
TOKENS = NUM * (PROMPT + COMPLETION - 1)
WITHIN = 0.02
# A step in bfloat16 takes a CPU 23 s; 45 s were seen on a busy one.
pytestmark = pytest.mark.timeout(240)
SMALL: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
# Its output layer holds more than its layers do.
LARGE = SMALL | {"model_type": "qwen3", "num_hidden_layers": 6, "hidden_size": 192, "intermediate_size": 512}
LARGE |= {"head_dim": 32, "num_attention_heads": 6, "vocab_size": 8192, "tie_word_embeddings": True}
SIZES = {"small": SMALL, "large": LARGE}


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """The group of a single rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def configuration(folder: Path, dtype: str, **trainer: Any) -> RunConfig:
    """One micro-batch, one update, no forward pass before it."""
    return RunConfig.model_validate(
        {
            "model": {"path": folder, "dtype": dtype},
            "data": {"train": "unused", "max_prompt_tokens": PROMPT},
            "grpo": {"updates_per_iteration": 1, "old_logprobs": "rollout", "max_new_tokens": COMPLETION},
            "trainer": {"max_tokens_per_micro_batch": TOKENS, "peak_tflops": 1, **trainer},
            "sync": {"bucket_mib": 2**-8},  # no sync is measured
        }
    )


def full_micro_batch(vocabulary: int) -> Samples:
    random = np.random.default_rng(0)
    return Samples(
        sample_ids=tuple(f"s{index}" for index in range(NUM)),
        update_index=np.zeros(NUM, np.int64),
        prompt_lengths=np.full(NUM, PROMPT, np.int64),
        completion_lengths=np.full(NUM, COMPLETION, np.int64),
        token_ids=random.integers(0, vocabulary, NUM * (PROMPT + COMPLETION)),
        rollout_logprobs=np.full(NUM * COMPLETION, -1.0, np.float32),
        advantages=np.array([1, -1] * (NUM // 2), np.float32),
        trainable=np.ones(NUM, np.bool_),
    )


def measured(config: RunConfig, vocabulary: int) -> tuple[int, int]:
    """Returns: bytes that a made engine holds, and the most in its second step (AdamW has its state by then)."""
    from trainer_service.megatron_engine.engine import MegatronEngine

    with LiveBytes() as live:
        engine = MegatronEngine(config, CPU)
        try:
            for tensor in engine.tensors().values():
                tensor.normal_(0, 0.02)
            engine._adam.masters_from_weights()
            engine.train_step(full_micro_batch(vocabulary), 1)
            resident = live.total()
            live.peak = 0
            engine.train_step(full_micro_batch(vocabulary), 1)
            return resident, live.peak
        finally:
            engine.close()


def norms_on_a_cpu(spec: ModelSpec) -> int:
    """Bytes that norms keep in bfloat16 on a CPU beside the arithmetic, which has a GPU's: no kernel is fused there.

    Input and result are kept in float32, where a GPU keeps the input in bfloat16.
    """
    columns = (2 * spec.num_layers + 1) * spec.hidden_size
    if spec.qk_norm:
        columns += spec.num_layers * (spec.size("q") + spec.size("kv"))
    return TOKENS * columns * (4 + 4 - 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_the_arithmetic_is_what_a_real_step_holds(size: str, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES[size]), encoding="utf-8")
    config = configuration(tmp_path, dtype)
    resident, peak = measured(config, SIZES[size]["vocab_size"])
    spec = ModelSpec.from_config(SIZES[size])
    (memory,) = trainer_memory(config, spec, completion_share=NUM * COMPLETION / TOKENS)
    assert memory.resident == pytest.approx(resident, rel=0.001)
    # of a whole iteration's samples; and on a CPU arrays of the host
    counted = memory.peak - memory.indices
    assert counted == pytest.approx(peak, rel=0.15)
    further = norms_on_a_cpu(spec) if dtype == "bfloat16" else 0
    assert counted + further == pytest.approx(peak, rel=WITHIN)
