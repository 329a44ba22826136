"""Models and tensor-parallel sizes other than the common case: each needs an engine of its own."""

from pathlib import Path

import pytest

from tests.integration.rollout.replica import Replica, Trainer
from tests.integration.rollout.tiny_models import logprobs, make_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPTS = [[7 + i, 8, 9, 10 + i] * (i + 1) for i in range(6)]


@pytest.mark.parametrize(
    ("family", "tied", "tensor_parallel"), [("qwen2", True, 1), ("qwen3", False, 2)], ids=["qwen2-tied", "qwen3-tp2"]
)
def test_a_synced_engine_generates_what_transformers_does(
    tmp_path: Path, module_redis: str, family: str, tied: bool, tensor_parallel: int
) -> None:
    model = make_model(tmp_path / "model", family, tied, seed=2)
    replica = Replica(tmp_path, model, module_redis, tensor_parallel=tensor_parallel)
    try:
        replica.wait_up()
        trainer = Trainer(replica)
        trainer.load(model)
        trainer.sync(1)
        groups = replica.generate(PROMPTS, temperature=0.0, max_new_tokens=12, version=1)
        trainer.member.close()
    finally:
        replica.close()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        ids = list(group.completions[0].token_ids)
        expected = logprobs(model, prompt, ids, 1.0)
        assert expected.argmax(-1).tolist() == ids
        for position, token in enumerate(ids):
            assert abs(float(expected[position, token]) - group.completions[0].logprobs[position]) <= 1e-5
