"""Real SGLang with every rotary scaling, to 4 x the original length, against transformers on the same folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.kit.models import SHORT, VOCABULARY, logprobs, make_model
from tests.kit.replicas import Trainer, lone_replica
from tests.unit.trainer.test_rotary import CASES as PUBLISHED_SIZES
from tests.unit.trainer.test_rotary import of_transformers

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]
NEW = 24
# The last ends 2 tokens before 4 x the original length, where SGLang ends requests itself.
PROMPTS = [[(7 * i + 3 * j) % (VOCABULARY - 6) + 5 for j in range(n)] for i, n in enumerate((1, 20, 60, 102))]
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SHORT}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen2", YARN),
    "yarn with all constants": (
        "qwen3",
        YARN | {"beta_fast": 16, "truncate": False, "mscale": 0.9, "mscale_all_dim": 0.4},
    ),
    "yarn in a mixture": ("qwen3_moe", {"rope_type": "yarn", "factor": 4.0}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "dynamic": ("qwen2", {"rope_type": "dynamic", "factor": 4}),
}


@pytest.mark.parametrize(("family", "rope"), CASES.values(), ids=CASES)
def test_logprobs_are_those_of_transformers(
    tmp_path: Path, module_redis: str, family: str, rope: dict[str, Any]
) -> None:
    model = make_model(
        tmp_path / "m", family, max_position_embeddings=SHORT, rope_parameters={**rope, "rope_theta": 1e4}
    )
    replica = lone_replica(tmp_path, model, module_redis)
    trainer = None
    try:
        trainer = Trainer(replica.wait_up())
        trainer.load(model)
        trainer.publish(1)
        groups = replica.generate(PROMPTS, max_new_tokens=NEW, version=1, seed=1)
    finally:
        if trainer is not None:
            trainer.close()
        replica.close()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        ids = list(group.completions[0].token_ids)
        assert len(ids) == NEW
        expected = logprobs(model, prompt, ids, 1.0).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert float((torch.tensor(group.completions[0].logprobs) - expected).abs().max()) <= 3e-5


@pytest.mark.parametrize("entries", PUBLISHED_SIZES.values(), ids=PUBLISHED_SIZES)
def test_sglangs_table_is_that_of_transformers_functions(entries: dict[str, Any]) -> None:
    from sglang.srt.layers.rotary_embedding import get_rope

    config = AutoConfig.for_model("qwen2", **entries)
    frequencies, factor, longest = of_transformers(config)
    rope, size, length = config.rope_parameters, config.head_dim, config.max_position_embeddings
    table = get_rope(size, size, length, rope["rope_theta"], True, dict(rope), torch.float32).cos_sin_cache
    assert len(table) >= longest
    angles = torch.arange(32.0)[:, None] * frequencies
    torch.testing.assert_close(table[:32], torch.cat((angles.cos(), angles.sin()), -1) * factor, rtol=0, atol=5e-6)
