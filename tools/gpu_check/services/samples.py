"""Completions of the rollout, and what the trainer says of the same tokens.

Legend: S samples, T completion tokens of all of them, flattened in sample order.
"""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem_clients import flow
from tools.bench_sync.whole_groups import prompt_group, submission, whole_groups
from tools.gpu_check.services.fleet import CALL_S, ServiceFleet
from tools.gpu_check.services.settings import PROMPT_TOKENS

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and what a replica made of it; spans: (policy version, first token, one beyond the last)."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...]


def prompts(vocabulary: int, number: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    random = np.random.default_rng(seed)
    return [[int(token) for token in random.integers(0, vocabulary, PROMPT_TOKENS)] for _ in range(number)]


async def generate(
    fleet: ServiceFleet, replica: str, version: int, *, number: int = 8, copies: int = 2, max_tokens: int = 24
) -> list[Sample]:
    """Sample a replica at temperature 1, in the order of the prompts. Raises: grpc.RpcError: it refuses."""
    asked = prompts(fleet.scale.vocabulary, number, seed=version)
    groups = [prompt_group(str(i), ids, copies) for i, ids in enumerate(asked)]
    request = submission(groups, version, max_new_tokens=max_tokens)
    responses = [response async for response in fleet.rollout(replica).Generate(iter([request]), timeout=CALL_S)]
    return [
        Sample(
            prompt=tuple(prompt),
            tokens=tuple(completion.token_ids),
            logprobs=tuple(completion.logprobs),
            spans=tuple((span.policy_version, span.start, span.end) for span in completion.version_spans),
        )
        for prompt, group in zip(asked, whole_groups(request, responses), strict=True)
        for completion in group.completions
    ]


def as_trained(samples: Sequence[Sample]) -> tuple[flow.Sample, ...]:
    """The samples as the trainer takes them; every second one is better than the others."""
    return tuple(
        flow.Sample(
            sample_id=f"s{index}",
            prompt=flow.Prompt(row=index, token_ids=array("I", sample.prompt), answer=""),
            completion=flow.Completion(
                token_ids=array("I", sample.tokens),
                logprobs=array("f", sample.logprobs),
                truncated=False,
                oldest_version=sample.spans[0][0],
            ),
            advantage=1.0 if index % 2 == 0 else -1.0,
            trainable=True,
        )
        for index, sample in enumerate(samples)
    )


async def train_step(fleet: ServiceFleet, step_id: str, samples: Sequence[Sample]) -> int:
    """One step of two updates on the samples. Returns: the version after it."""
    half, trained = len(samples) // 2, as_trained(samples)
    version = (await fleet.trainer.status()).policy_version
    batch = flow.TrainBatch(step_id=step_id, policy_version=version, updates=(trained[:half], trained[half:]))
    return (await fleet.trainer.train_step(batch)).policy_version


async def trainer_logprobs(fleet: ServiceFleet, samples: Sequence[Sample]) -> Floats:
    """[T] The trainer's log-probs of the samples' tokens under its policy of now."""
    async with asyncio.timeout(CALL_S):
        return (await fleet.trainer.logprobs(as_trained(samples))).astype(np.float64)


def rollout_logprobs(samples: Sequence[Sample]) -> Floats:
    """[T] The same, as the rollout returned them."""
    return np.concatenate([np.asarray(sample.logprobs, dtype=np.float64) for sample in samples])


def labels(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """[T] The policy version that every token is labelled with; -1: none."""
    found = [np.full(len(sample.tokens), -1, dtype=np.int64) for sample in samples]
    for sample, versions in zip(samples, found, strict=True):
        for version, start, end in sample.spans:
            versions[start:end] = version
    return np.concatenate(found)


def first_of(samples: Sequence[Sample], version: int) -> NDArray[np.int64]:
    """Find the place in [T] of each first token that is labelled `version`, of samples that begin with another."""
    places, at = [], 0
    for sample in samples:
        places += [at + start for found, start, _ in sample.spans if found == version and start > 0]
        at += len(sample.tokens)
    return np.asarray(places, dtype=np.int64)
