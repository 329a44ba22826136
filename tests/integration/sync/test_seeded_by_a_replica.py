"""A replica seeds another while it generates, without a trainer: real SGLang on both sides.

What the source samples meanwhile is what it samples without that; the joiner is its copy, bitwise and in its answers.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.models import make_model
from tests.kit.processes import Services
from tests.kit.replicas import SLOTS_S, Replicas
from tests.kit.round import CALL_S, new_round, run_round
from tests.kit.waiting import until
from weightsync.layouts.layout import Parallel

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

TRAINER = Parallel(tensor=2)
CONTEXT, NUM_PROMPTS, NUM_TOKENS, SEED = 1024, 8, 800, 11
TOLERANCE = 1e-4
SEEDINGS = 3
IN_PLACE, STAGED = pb.INSTALL_MODE_IN_PLACE, pb.INSTALL_MODE_STAGED


@pytest.mark.parametrize(
    ("family", "layout", "install"),
    [
        pytest.param("qwen3", Parallel(), IN_PLACE, id="in_place"),
        pytest.param("qwen3", Parallel(tensor=2), STAGED, id="tp2-staged"),
        pytest.param("qwen3_moe", Parallel(tensor=2, expert=2), IN_PLACE, id="experts"),
    ],
)
def test_a_joiner_is_the_copy_of_a_source_that_generates_on(
    family: str, layout: Parallel, install: int, services: Services, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", family, max_position_embeddings=CONTEXT)
    sizes: dict[str, Any] = {"tokens": NUM_PROMPTS * CONTEXT}
    first = Replicas(services, model, {"rollout-0": layout}, **sizes)
    second = Replicas(services, model, {"rollout-1": layout}, **sizes)
    first.wait_up()
    second.wait_up()
    first.sync(model, TRAINER, 1, install_mode=install)  # after which there is no trainer any more
    source, joiner, draw = first["rollout-0"], second["rollout-1"], random.Random(1)
    prompts = [[draw.randrange(6, 90) for _ in range(20)] for _ in range(NUM_PROMPTS)]
    sampling: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "version": 1, "seed": SEED}
    alone = source.generate(prompts, **sampling)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(source.generate, prompts, **sampling)
        until(lambda: request.done() or source.status().running_groups == NUM_PROMPTS, CALL_S)
        for number in range(SEEDINGS):
            second.poison()
            round_ = new_round(
                first.group,
                1,
                layout,
                {"rollout-1": layout},
                wait_s=SLOTS_S,
                source="rollout-0",
                round_id=f"seeding-{number}",
                install_mode=install,
                transport=pb.SYNC_TRANSPORT_COLLECTIVE,
            )
            run_round({"rollout-0": source.phase, "rollout-1": joiner.phase}, round_)
            assert source.status().running_groups == NUM_PROMPTS, "it has ended before it could be disturbed"
            assert joiner.checksums() == source.checksums()
        meanwhile = request.result(timeout=CALL_S)
    for before, after in zip(alone, meanwhile, strict=True):
        (one,), (other,) = before.completions, after.completions
        assert list(one.token_ids) == list(other.token_ids)
        assert len(other.token_ids) == NUM_TOKENS
        assert max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)) <= TOLERANCE
        assert [span.policy_version for span in other.version_spans] == [1]
    for one, other in zip(source.greedy(prompts, 1, 40), joiner.greedy(prompts, 1, 40), strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        assert list(one.logprobs) == pytest.approx(list(other.logprobs), abs=TOLERANCE)
