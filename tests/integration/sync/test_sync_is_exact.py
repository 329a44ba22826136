"""What a sync writes into SGLang is, bit for bit, what SGLang's own loader puts there from the same folder.

Real SGLang replicas, real Redis, gloo. Every parameter is NaN before each of the two, so that nothing can be right by
having been right before. Here the trainer's ranks are weight-sync members without Megatron, which makes every layout
cheap; test_megatron_sync_is_exact.py has the real trainer.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit.models import logprobs, make_model
from tests.kit.processes import Services
from tests.kit.replicas import Replicas
from weightsync.layouts.layout import Parallel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PROMPTS = [[7 + i, 8, 9, 10 + i] * (i + 1) for i in range(6)]
NUM_TOKENS = 12

PLAIN = [
    Parallel(),
    Parallel(tensor=2),
    Parallel(pipeline=2),
    Parallel(tensor=2, pipeline=2),
    Parallel(data=2, context=2),
    Parallel(pipeline=2, virtual_pipeline=3),
    Parallel(tensor=2, pipeline=3, first_stage_layers=1, last_stage_layers=1),
    Parallel(pipeline=4, embedding_counts=True, loss_counts=True),
]
EXPERTS = [
    Parallel(tensor=2, expert=2),
    Parallel(tensor=2, expert_tensor=2),
    Parallel(data=2, expert=4, tensor=2),
    Parallel(tensor=2, data=2, expert=2, expert_tensor=2),
    Parallel(pipeline=2, virtual_pipeline=3, data=2, expert=2),
]
NO_KV_TO_SHARE = [layout for layout in PLAIN if layout.tensor == 1]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model, the layouts that it is sent from, and those of its replicas."""

    family: str
    sources: list[Parallel]
    targets: list[Parallel]
    tied: bool = False
    changes: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "qwen2-tied": Kind(family="qwen2", tied=True, sources=PLAIN, targets=[Parallel(tensor=2)]),
    "llama-replicated-kv": Kind(
        family="llama",
        sources=NO_KV_TO_SHARE,
        targets=[Parallel(tensor=2)],
        changes={"num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "qwen3_moe": Kind(family="qwen3_moe", sources=PLAIN + EXPERTS, targets=[Parallel(), Parallel(tensor=2, expert=2)]),
    "qwen3": Kind(family="qwen3", sources=PLAIN, targets=[Parallel(), Parallel(tensor=2)]),
    "qwen2": Kind(family="qwen2", sources=PLAIN, targets=[Parallel(), Parallel(tensor=2)]),
    "llama-tied": Kind(family="llama", tied=True, sources=PLAIN, targets=[Parallel(), Parallel(tensor=2)]),
    "qwen3-four-ranks": Kind(family="qwen3", tied=True, sources=PLAIN, targets=[Parallel(tensor=4)]),
    "qwen3_moe-sliced": Kind(
        family="qwen3_moe",
        sources=PLAIN + EXPERTS,
        targets=[Parallel(tensor=2), Parallel(tensor=4, expert=2)],
    ),
}
FAST = ("qwen2-tied", "qwen3_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in KINDS]
)
def test_sync_writes_what_sglang_would_load(name: str, services: Services, tmp_path: Path) -> None:
    kind = KINDS[name]
    # Six layers: stages of 3 + 3, 1 + 4 + 1 or 1 + 2 + 2 + 1, and virtual ones of one layer.
    model = make_model(tmp_path / "m", kind.family, kind.tied, **dict[str, Any](num_hidden_layers=6) | kind.changes)
    replicas = Replicas(services, model, {f"rollout-{i}": target for i, target in enumerate(kind.targets)})
    replicas.wait_up()
    truth = replicas.truth(model)
    version = 0
    for version, source in enumerate(kind.sources, 1):
        replicas.poison()
        received = replicas.sync(model, source, version)
        assert replicas.checksums() == truth, source
        assert [report.bytes_received for report in received] == [report.shard_bytes for report in received]
    for replica in replicas.layouts:
        check_generation(replicas, replica, version)


def check_generation(replicas: Replicas, replica: str, version: int) -> None:
    """The engine computes with these weights what transformers does."""
    for prompt, completion in zip(PROMPTS, replicas[replica].greedy(PROMPTS, version, NUM_TOKENS), strict=True):
        ids = list(completion.token_ids)
        expected = logprobs(replicas.model, prompt, ids, 1.0)
        assert expected.argmax(-1).tolist() == ids
        for position, token in enumerate(ids):
            assert abs(float(expected[position, token]) - completion.logprobs[position]) <= 1e-5
