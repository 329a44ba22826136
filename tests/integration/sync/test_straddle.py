"""Requests that straddle a flip (keep_kv, recompute): each token says which version has sampled it, and that is true.

Real SGLang, with its plain scheduler (what CPUs get) and with its overlap scheduler (what GPUs get). What a completion
must look like is computed by transformers: the old model up to the flip, then the new one, with keep_kv on top of the
old one's keys and values.
"""

import functools
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem_api.rollout.v1 import rollout_pb2
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
NUM_LONG, LONG_PROMPT, LONG_SEED, NUM_FRESH = 16, 100, 7, 32
LONG_TOKENS = CONTEXT - LONG_PROMPT
KEEP_KV, RECOMPUTE = pb.PAUSE_MODE_KEEP_KV, pb.PAUSE_MODE_RECOMPUTE
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
        round_ = replicas.round(2, TRAINER, install_mode=install, pause_mode=KEEP_KV)
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


@pytest.mark.parametrize(
    ("module", "layout", "chunk"),
    [
        pytest.param("rollout_service", Parallel(), "", id="plain"),
        pytest.param(OVERLAPPING, Parallel(tensor=2), "64", id="overlap-tp2-chunks", marks=pytest.mark.slow),
    ],
)
def test_a_flip_aborts_none_of_16_long_generations_and_is_exact_if_it_recomputes(
    module: str, layout: Parallel, chunk: str, services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFILL_CHUNK", chunk)
    models = [make_model(tmp_path / str(seed), seed=seed, max_position_embeddings=CONTEXT) for seed in range(2)]
    replicas = Replicas(services, models[0], {"rollout-0": layout}, module=module, tokens=NUM_LONG * CONTEXT)
    replicas.wait_up()
    replica, draw = replicas["rollout-0"], random.Random(1)
    prompts = [[draw.randrange(6, 90) for _ in range(draw.randrange(4, LONG_PROMPT))] for _ in range(NUM_LONG)]
    pauses = {2: RECOMPUTE, 3: KEEP_KV, 4: RECOMPUTE, 5: RECOMPUTE}
    with ThreadPoolExecutor(1) as pool, replicas.trainer(models[0], TRAINER) as trainer:
        run_round(trainer.participants, replicas.round(1, TRAINER, install_mode=pb.INSTALL_MODE_STAGED))
        sampling: dict[str, Any] = {"max_new_tokens": LONG_TOKENS, "version": 1, "seed": LONG_SEED}
        request = pool.submit(replica.generate, prompts, **sampling)
        until(lambda: request.done() or running_groups(replicas) == NUM_LONG, CALL_S)
        for version, pause in pauses.items():
            if version < 5:  # a request that came after them has been answered: they have tokens of the last version
                replica.greedy([[5, 6]], version - 1, 64)
            # the last flip comes soon: in chunks they are still in their prefill
            trainer.load(models[(version - 1) % 2])
            install = pb.INSTALL_MODE_IN_PLACE if version == 2 else pb.INSTALL_MODE_STAGED
            round_ = replicas.round(version, TRAINER, install_mode=install, pause_mode=pause)
            run_round(trainer.participants, round_)
            assert running_groups(replicas) == NUM_LONG
        completions = [group.completions[0] for group in request.result(timeout=CALL_S)]
    flips = [
        check_long(models, pauses, prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
    ]
    begun = [[*prompt, *one.token_ids[:flip]] for prompt, one, flip in zip(prompts, completions, flips, strict=True)]
    fresh = replica.generate(begun, max_new_tokens=NUM_FRESH, version=5, seed=LONG_SEED)
    for completion, flip, (again,) in zip(completions, flips, [group.completions for group in fresh], strict=True):
        assert list(completion.token_ids[flip : flip + NUM_FRESH]) == list(again.token_ids)
        assert completion.logprobs[flip : flip + NUM_FRESH] == pytest.approx(again.logprobs, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rollout_service", OVERLAPPING])
@pytest.mark.parametrize("pause", [KEEP_KV, RECOMPUTE], ids=["keep_kv", "recompute"])
def test_requests_in_any_state_at_the_flip_carry_true_versions(
    module: str, pause: int, services: Services, tmp_path: Path
) -> None:
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
            publish(replicas, new, version, pb.INSTALL_MODE_IN_PLACE, pause)
            finished = [each for client in clients for each in client.result(timeout=CALL_S)]
        for prompt, completion in finished:
            length = len(completion.token_ids)
            spans = [(span.start, span.end, span.policy_version) for span in completion.version_spans]
            flip = next((start for start, _, sampler in spans if sampler == version), length)
            parts = [(0, flip, version - 1), (flip, length, version)]
            assert spans == [part for part in parts if part[0] < part[1]]
            if flip < length:
                assert differences(old, new, prompt, completion, flip, keeps=pause == KEEP_KV) <= TOLERANCE
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


def check_long(models: Sequence[Path], pauses: Mapping[int, int], prompt: Sequence[int], completion: Any) -> int:
    """Check a completion that was begun by version 1 and straddles a flip to each further one.

    Returns: the first token of the last version.
    """
    assert completion.finish_reason == rollout_pb2.FINISH_REASON_LENGTH
    assert len(completion.token_ids) == len(completion.logprobs) == LONG_TOKENS
    spans = [(span.policy_version, span.start, span.end) for span in completion.version_spans]
    assert [start for _, start, _ in spans] == [0, *(end for *_, end in spans[:-1])]
    assert [version for version, *_ in spans] in ([1, 2, 3, 4, 5], [1, 2, 3, 5])
    for version, start, end in spans:
        error = max(off_policy(models[(version - 1) % 2], prompt, completion)[start:end])
        if pauses.get(version) == KEEP_KV:
            assert error > 10 * TOLERANCE  # what this test would see if recompute kept the cache
        else:
            assert error <= TOLERANCE, (version, start, end)
    return int(spans[-1][1])


def publish(replicas: Replicas, folder: Path, version: int, install: int, pause: int = KEEP_KV) -> None:
    replicas.sync(folder, TRAINER, version, install_mode=install, pause_mode=pause)


def running_groups(replicas: Replicas) -> int:
    return int(replicas["rollout-0"].status().running_groups)


@functools.lru_cache(maxsize=4)
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def off_policy(folder: Path, prompt: Sequence[int], completion: Any) -> list[float]:
    """|log-prob - transformers'| of each token, if this model computed everything before it too."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        expected = torch.log_softmax(reference(folder)(ids[:, :-1]).logits[0, len(prompt) - 1 :].float(), dim=-1)
    sampled = expected.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    errors: list[float] = (sampled - torch.tensor(completion.logprobs)).abs().tolist()
    return errors


def differences(
    old: Path, new: Path, prompt: Sequence[int], completion: Any, flip: int, *, keeps: bool = True
) -> float:
    """Largest |log-prob - transformers'| if `flip` is the first token that the new model has sampled.

    Args:
        keeps: on the old one's keys and values.
    """
    if not keeps:
        return max(*off_policy(old, prompt, completion)[:flip], *off_policy(new, prompt, completion)[flip:], 0.0)
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
