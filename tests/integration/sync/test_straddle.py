"""Requests that straddle a flip (keep_kv): each token says by which version it was sampled, and that is true.

Real SGLang, with its plain scheduler (what CPUs get) and with its overlap scheduler (what GPUs get). What a completion
must look like is computed by transformers: the old model up to the flip, then the new one on top of the old one's keys
and values.
"""

import functools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.models import make_model
from tests.kit.processes import Services
from tests.kit.replicas import Replicas
from tests.kit.round import CALL_S, run_phase, run_round
from tests.kit.waiting import until
from weightsync.layouts.layout import Parallel
from weightsync.round.phases import PREPARE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

TRAINER = Parallel(tensor=2)
PROMPTS = [[7, 8, 9, 10], [11, 12, 13]]
CONTEXT = 1024
NUM_TOKENS = 1000  # many seconds of decoding; a round takes tenths
TOLERANCE = 1e-4
CLIENTS = 4
OVERLAPPING = "tests.integration.sync.overlapping_rollout"


@pytest.mark.parametrize(
    ("install", "module"),
    [
        pytest.param(pb.INSTALL_MODE_IN_PLACE, "rollout_service", id="in_place", marks=pytest.mark.slow),
        pytest.param(pb.INSTALL_MODE_STAGED, "rollout_service", id="staged", marks=pytest.mark.slow),
        pytest.param(pb.INSTALL_MODE_IN_PLACE, OVERLAPPING, id="in_place-overlap"),
        pytest.param(pb.INSTALL_MODE_STAGED, OVERLAPPING, id="staged-overlap", marks=pytest.mark.slow),
    ],
)
def test_tokens_of_a_straddling_request_carry_the_version_that_sampled_them(
    install: int, module: str, services: Services, tmp_path: Path
) -> None:
    old, new = (
        make_model(tmp_path / name, seed=seed, max_position_embeddings=CONTEXT)
        for seed, name in enumerate(("old", "new"))
    )
    replicas = Replicas(services, old, {"rollout-0": Parallel()}, module=module, tokens=4 * CONTEXT)
    replicas.wait_up()
    publish(replicas, old, 1, install)
    with ThreadPoolExecutor(1) as pool, replicas.trainer(new, TRAINER) as trainer:
        round_ = replicas.round(2, TRAINER, install_mode=install, pause_mode=pb.PAUSE_MODE_KEEP_KV)
        run_phase(trainer.participants, PREPARE, round_)  # connecting may take longer than the request
        request = pool.submit(replicas["rollout-0"].greedy, PROMPTS, 1, NUM_TOKENS)
        until(lambda: request.done() or running_groups(replicas) == len(PROMPTS), CALL_S)
        # A request that came after them has been answered: they have tokens of the old version.
        replicas["rollout-0"].greedy([[5, 6]], 1, 8)
        run_round(trainer.participants, round_)
        completions = request.result(timeout=CALL_S)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        check_straddler(old, new, prompt, completion, NUM_TOKENS)
    with pytest.raises(grpc.RpcError, match="asked for policy version 1"):
        replicas["rollout-0"].greedy(PROMPTS, 1, 1)
    fresh = replicas["rollout-0"].greedy(PROMPTS, 2, 4)
    assert [completion.cached_tokens for completion in fresh] == [0] * len(PROMPTS)
    for prompt, completion in zip(PROMPTS, fresh, strict=True):
        assert differences(old, new, prompt, completion, 0) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rollout_service", OVERLAPPING])
def test_requests_in_any_state_at_the_flip_carry_true_versions(module: str, services: Services, tmp_path: Path) -> None:
    """Requests come all the time, so that at each flip some wait, some are in prefill and some at their last token."""
    models = [make_model(tmp_path / str(seed), seed=seed) for seed in range(2)]
    replicas = Replicas(services, models[0], {"rollout-0": Parallel()}, module=module)
    replicas.wait_up()
    publish(replicas, models[0], 1, pb.INSTALL_MODE_IN_PLACE)
    flips = set()
    for version in range(2, 10):
        old, new = models[version % 2], models[(version + 1) % 2]
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(ask_until_refused, replicas, client, version - 1) for client in range(CLIENTS)]
            until(lambda: running_groups(replicas) > 0, CALL_S)
            publish(replicas, new, version, pb.INSTALL_MODE_IN_PLACE)
            finished = [each for client in clients for each in client.result(timeout=CALL_S)]
        for prompt, completion in finished:
            length = len(completion.token_ids)
            spans = [(span.start, span.end, span.policy_version) for span in completion.version_spans]
            flip = next((start for start, _, sampler in spans if sampler == version), length)
            parts = [(0, flip, version - 1), (flip, length, version)]
            assert spans == [part for part in parts if part[0] < part[1]]
            if flip < length:
                assert differences(old, new, prompt, completion, flip) <= TOLERANCE
                flips.add(flip)
    assert {0, 1} < flips  # some waited, some had their prefill read or under way, some were further


def ask_until_refused(replicas: Replicas, client: int, version: int) -> list[tuple[list[int], Any]]:
    """Short requests, more of them than the KV cache holds, until the replica has another version.

    Returns: prompts with their completions.
    """
    draw = random.Random(f"{client}/{version}")
    finished: list[tuple[list[int], Any]] = []
    while True:
        prompts = [[draw.randrange(6, 90) for _ in range(draw.randrange(2, 90))] for _ in range(8)]
        try:
            completions = replicas["rollout-0"].greedy(prompts, version, draw.randrange(1, 8))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                return finished
            raise
        finished += zip(prompts, completions, strict=True)


def check_straddler(old: Path, new: Path, prompt: Sequence[int], completion: Any, num_tokens: int) -> None:
    first, second = completion.version_spans
    assert (first.policy_version, second.policy_version) == (1, 2)
    assert 0 == first.start < first.end == second.start < second.end == num_tokens
    errors = [differences(old, new, prompt, completion, second.start + shift) for shift in (-1, 0, 1)]
    assert errors[1] <= TOLERANCE
    assert min(errors[0], errors[2]) > 10 * TOLERANCE  # a span that is off by one token would be seen


def publish(replicas: Replicas, folder: Path, version: int, install: int) -> None:
    replicas.sync(folder, TRAINER, version, install_mode=install, pause_mode=pb.PAUSE_MODE_KEEP_KV)


def running_groups(replicas: Replicas) -> int:
    return int(replicas["rollout-0"].status().running_groups)


@functools.lru_cache(maxsize=4)
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def differences(old: Path, new: Path, prompt: Sequence[int], completion: Any, flip: int) -> float:
    """Largest |log-prob - transformers'| if `flip` is the first token that the new model has sampled."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    # The forward pass that samples token `flip` is the first of the new weights; its input is the token before.
    cut = len(prompt) + flip - 1
    logits, cache = [], None
    with torch.no_grad():
        if flip > 0:
            before = reference(old)(ids[:, :cut], use_cache=True)
            logits, cache = [before.logits[0, len(prompt) - 1 :]], before.past_key_values
        after = reference(new)(ids[:, cut if flip > 0 else 0 : -1], past_key_values=cache).logits[0]
        logits.append(after if flip > 0 else after[len(prompt) - 1 :])
    expected = torch.log_softmax(torch.cat(logits).float(), dim=-1)
    sampled = expected.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    return float((sampled - torch.tensor(completion.logprobs)).abs().max())
