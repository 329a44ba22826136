"""Real SGLang behind real gRPC: what it generates is what transformers computes from the same checkpoint."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from servicekit.errors import REASON_KEY
from servicekit.redis.records import AgreedSettings
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_api.weights.v1 import weights_pb2
from tandem_config.comparing.agreeing import agreed_settings
from tests.kit.models import CONTEXT, STOP, VOCABULARY, logprobs, text_of
from tests.kit.replicas import Replica, Trainer
from tests.kit.round import CALL_S
from tests.kit.waiting import throughout, until
from tools.bench_sync.whole_groups import SampledGroup, prompt_group, submission

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# Lengths from 1 to 40, so that the batched attention pads.
PROMPTS = [[(7 * i + 3 * j) % (VOCABULARY - 6) + 5 for j in range(1 + (11 * i) % 40)] for i in range(12)]


@pytest.fixture(scope="module", autouse=True)
def seeded(replica: Replica, trainer: Trainer) -> None:
    trainer.publish(1)


def worst_difference(model: Path, prompts: list[list[int]], groups: list[SampledGroup], temperature: float) -> float:
    differences = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group.completions:
            ids = list(completion.token_ids)
            expected = logprobs(model, prompt, ids, temperature).gather(1, torch.tensor(ids)[:, None])[:, 0]
            differences.append(float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return max(differences)


def test_status_and_record_say_what_settings_were_read(replica: Replica) -> None:
    digest = AgreedSettings(agreed_settings(replica.config)).digest
    assert replica.status().settings_digest == replica.services.record_of("rollout", replica.name).settings == digest


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_at_the_temperature(
    replica: Replica, model: Path, temperature: float
) -> None:
    groups = replica.generate(PROMPTS, n=2, temperature=temperature, max_new_tokens=24, version=1)
    # Sampling takes unlikely tokens too; at log-probs near -20 float32 resolves 2e-6, and 1/T scales what is summed up.
    assert worst_difference(model, PROMPTS, groups, temperature) <= 3e-5


def test_greedy_tokens_are_the_argmax_with_logprobs_at_temperature_one(replica: Replica, model: Path) -> None:
    groups = replica.generate(PROMPTS, temperature=0.0, max_new_tokens=24, version=1)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        ids = list(group.completions[0].token_ids)
        assert logprobs(model, prompt, ids, 1.0).argmax(-1).tolist() == ids
    assert worst_difference(model, PROMPTS, groups, 1.0) <= 1e-5


def test_a_stop_token_is_the_last_token(replica: Replica) -> None:
    groups = replica.generate(PROMPTS[:4], n=32, max_new_tokens=64, stop=(STOP,), version=1)
    completions = [completion for group in groups for completion in group.completions]
    stopped = [c for c in completions if c.finish_reason == pb.FINISH_REASON_STOP and STOP in c.token_ids]
    assert stopped
    for completion in stopped:
        assert completion.token_ids[-1] == STOP
        assert list(completion.token_ids).count(STOP) == 1
        assert len(completion.logprobs) == len(completion.token_ids)
    for completion in completions:
        if completion.finish_reason == pb.FINISH_REASON_LENGTH:
            assert len(completion.token_ids) == 64


def test_a_stop_text_ends_a_completion_with_all_of_its_tokens(replica: Replica, model: Path) -> None:
    """The text is that of two tokens; the completion ends with the second, with the log-probs of both."""
    (whole,) = replica.generate(PROMPTS[:1], max_new_tokens=32, version=1, seed=3)[0].completions
    ids = list(whole.token_ids)
    text = text_of(ids[9:11])
    end = text_of(ids).index(text) + 2
    group = replica.generate(PROMPTS[:1], max_new_tokens=32, version=1, seed=3, texts=["not found", text])[0]
    (stopped,) = group.completions
    assert list(stopped.token_ids) == ids[:end]
    assert (whole.finish_reason, stopped.finish_reason) == (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP)
    assert worst_difference(model, PROMPTS[:1], [group], 1.0) <= 3e-5


def tokens_of(groups: list[SampledGroup]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in group.completions] for group in groups]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.7, "top_k": 20, "repetition_penalty": 1.3}])
def test_a_seed_repeats_completions_whatever_else_is_generated(replica: Replica, settings: dict[str, Any]) -> None:
    seeded = tokens_of(replica.generate(PROMPTS, n=4, version=1, seed=11, **settings))
    with ThreadPoolExecutor(2) as both:
        beside = both.submit(replica.generate, PROMPTS, n=8, version=1, seed=5, **settings)
        assert tokens_of(replica.generate(PROMPTS, n=4, version=1, seed=11, **settings)) == seeded
        beside.result()
    assert tokens_of(replica.generate(PROMPTS[:1], n=4, version=1, seed=11, **settings)) == seeded[:1]
    assert tokens_of(replica.generate(PROMPTS, n=4, version=1, seed=12, **settings)) != seeded
    assert len({tuple(ids) for ids in seeded[0]}) == 4


def test_calls_with_and_without_seeds_run_side_by_side(replica: Replica) -> None:
    with ThreadPoolExecutor(4) as calls:
        seeds = [None, 1, None, 2]
        groups = list(calls.map(lambda seed: replica.generate(PROMPTS, n=4, version=1, seed=seed), seeds))
    assert [len(each) for each in groups] == [len(PROMPTS)] * 4


def test_min_p_leaves_unlikely_tokens_out(replica: Replica, model: Path) -> None:
    groups = replica.generate(PROMPTS[:4], n=4, version=1, min_p=0.5, seed=1)
    for prompt, group in zip(PROMPTS, groups, strict=False):
        for completion in group.completions:
            ids = list(completion.token_ids)
            logprob = logprobs(model, prompt, ids, 1.0)
            chosen = logprob.gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert (chosen.exp() >= 0.49 * logprob.max(-1).values.exp()).all()


def test_completions_of_a_group_differ(replica: Replica) -> None:
    (group,) = replica.generate(PROMPTS[:1], n=8, version=1)
    assert len({tuple(completion.token_ids) for completion in group.completions}) == 8


def test_every_token_carries_the_version(replica: Replica) -> None:
    (group,) = replica.generate(PROMPTS[:1], version=1)
    (completion,) = group.completions
    (span,) = completion.version_spans
    assert (span.start, span.end, span.policy_version) == (0, len(completion.token_ids), 1)


def test_a_repeated_prompt_comes_from_the_prefix_cache(replica: Replica) -> None:
    prompt = [9] * 40
    replica.generate([prompt], version=1)
    (group,) = replica.generate([prompt], version=1)
    assert group.completions[0].cached_tokens >= len(prompt) - 1


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"prompts": [[]]}, grpc.StatusCode.INVALID_ARGUMENT, "group '0': prompt_ids is empty"),
        ({"prompts": [[1, VOCABULARY]]}, grpc.StatusCode.INVALID_ARGUMENT, f"prompt_ids[1] is {VOCABULARY}"),
        ({"temperature": -1.0}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature is -1"),
        ({"max_new_tokens": 10_000}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_new_tokens is 10000"),
        ({"prompts": [[1]] * 1025}, grpc.StatusCode.RESOURCE_EXHAUSTED, "1025 groups in one call"),
        ({"version": 2}, grpc.StatusCode.FAILED_PRECONDITION, "asked for policy version 2"),
    ],
)
def test_a_bad_request_is_refused_by_name(
    replica: Replica, changes: dict[str, object], code: grpc.StatusCode, says: str
) -> None:
    arguments: dict[str, object] = {"prompts": PROMPTS[:1], "version": 1} | changes
    with pytest.raises(grpc.RpcError) as refused:
        replica.generate(**arguments)  # type: ignore[arg-type]
    assert refused.value.code() == code
    assert says in refused.value.details()
    assert dict(refused.value.trailing_metadata())[REASON_KEY]


def test_what_is_submitted_in_a_pause_waits_for_resume(replica: Replica) -> None:
    request = pb.PauseGenerationRequest(mode=weights_pb2.PAUSE_MODE_DRAIN)
    assert replica.stub.PauseGeneration(request, timeout=CALL_S).state == weights_pb2.REPLICA_STATE_PAUSED
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replica.generate, PROMPTS[:1], version=1)
        throughout(lambda: not waiting.done() and not replica.status().running_groups, 1.0)
        resumed = replica.stub.ResumeGeneration(pb.ResumeGenerationRequest(), timeout=CALL_S)
        assert resumed.state == weights_pb2.REPLICA_STATE_SERVING
        assert waiting.result(timeout=CALL_S)


def test_a_large_call_that_is_given_up_ends_in_the_engine_too(replica: Replica) -> None:
    version = replica.status().policy_version
    request = submission([prompt_group("all", [5, 6], 4096)], version, max_new_tokens=400)
    with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
        list(replica.stub.Generate(iter([request]), timeout=3))
    assert len(replica.generate([[5, 6]], max_new_tokens=2, version=version)) == 1
    before = replica.status().engine_progress
    throughout(lambda: replica.status().engine_progress == before, 1.0)


def test_a_long_completion_is_progress_and_a_stuck_engine_is_none(replica: Replica) -> None:
    """What rollout.stall_timeout_s waits for moves while nothing is finished yet."""
    finished = replica.status().generated_tokens
    told: set[int] = set()

    def note() -> bool:
        status = replica.status()
        if status.running_groups and status.generated_tokens == finished:
            told.add(status.engine_progress)
        return len(told) > 3

    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(replica.generate, PROMPTS[:1], n=16, max_new_tokens=CONTEXT - 8, version=1)
        until(note, CALL_S, "another progress")
        schedulers = [child for child in replica.family() if "scheduler" in " ".join(child.cmdline())]
        assert schedulers
        for process in schedulers:
            process.suspend()
        try:
            before = replica.status().engine_progress
            assert replica.status().running_groups == 1
            throughout(lambda: replica.status().engine_progress == before, 1.0)
        finally:
            for process in schedulers:
                process.resume()
        assert len(generating.result(timeout=CALL_S)) == 1


def test_status_and_checksums(replica: Replica) -> None:
    status = replica.status()
    assert (status.name, status.state, status.policy_version) == ("rollout-0", weights_pb2.REPLICA_STATE_SERVING, 1)
    assert status.generated_tokens > 0
    assert {"sglang", "torch"} <= set(status.versions.packages)
    reply = replica.stub.GetChecksums(pb.GetChecksumsRequest(), timeout=CALL_S)
    (rank,) = reply.ranks
    # SGLang pads the vocabulary to a multiple of 64.
    assert rank.checksums["model.embed_tokens.weight"].startswith("float32:128x64:")
