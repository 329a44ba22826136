"""What the coordinator sends and what the trainer makes of it: where the stream is cut changes no number of a step."""

from array import array
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learn.updates import make_batch
from servicekit.errors import InvalidRequest
from servicekit.rpc.limits import SAMPLE_CHUNK_BYTES
from tandem_api.trainer.v1 import trainer_pb2
from tandem_clients.flow import Completion, Prompt, Sample, TrainBatch
from tandem_clients.trainer import Trainer, sample_chunks, step_requests
from tandem_config.schema import GrpoSection
from trainer_service.micro_batches.checks import Limits, check_updates
from trainer_service.micro_batches.merge import check_counts, merge
from trainer_service.micro_batches.plan import RankShare, plan_step
from trainer_service.micro_batches.samples import Samples

LIMITS = Limits(vocab_size=1000, max_positions=64, max_tokens=128)
RANKS = [
    RankShare(data_rank=rank, data_parallel=2, pipeline_parallel=2, row_multiple=2, max_tokens=128, even_length=100.0)
    for rank in range(2)
]


def random_samples(rng: np.random.Generator) -> list[Sample]:
    """Ragged ones; some masked, wholly or token by token, some without an advantage."""

    def mask(number: int, length: int) -> "array[int] | None":
        return array("B", [1, *rng.integers(0, 2, length - 1).tolist()]) if number % 7 == 6 else None

    def divided(sample: Sample) -> Sample:
        """With a branch wherever an answer begins."""
        mask = list(sample.completion.loss_mask or ())
        begins = tuple(place for place in range(1, len(mask)) if mask[place] < mask[place - 1])
        return replace(sample, completion=replace(sample.completion, branches=begins))

    whole = [
        Sample(
            sample_id=f"i1.g{i // 4}.row{i}#{i % 4}",
            prompt=Prompt(row=i, token_ids=array("I", rng.integers(0, 1000, rng.integers(1, 30)).tolist()), answer=""),
            completion=Completion(
                token_ids=array("I", rng.integers(0, 1000, length).tolist()),
                logprobs=array("f", rng.normal(-2, 1, length).tolist()),
                truncated=False,
                oldest_version=0,
                loss_mask=mask(i, length),
            ),
            advantage=float(rng.normal()) * (i % 3 > 0),
            trainable=i % 5 > 0,
        )
        for i, length in enumerate(rng.integers(1, 30, size=rng.integers(1, 40)).tolist())
    ]
    return [*map(divided, whole)]


def received(batch: TrainBatch, chunk_bytes: int) -> tuple[Samples, int]:
    """What every rank of the trainer trains on, after the way through messages and commands; number of messages."""
    header, *parts = [
        type(request).FromString(request.SerializeToString()) for request in step_requests(batch, chunk_bytes)
    ]
    samples = merge([part.chunk for part in parts], LIMITS)
    check_updates(samples, header.header.num_updates, header.header.num_samples)
    return Samples.from_parts(samples.to_parts()), len(parts)


def same(one: Any, other: Any) -> bool:
    """Equal in every bit of every array."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() if isinstance(a, np.ndarray) else a == b for a, b in pairs
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_updates=st.integers(1, 4), chunk_bytes=st.integers(1, 4000))
def test_chunks_of_any_size_give_the_same_samples_and_micro_batches(
    seed: int, num_updates: int, chunk_bytes: int
) -> None:
    samples = random_samples(np.random.default_rng(seed))

    def sent(size: int) -> tuple[Samples, int]:
        rng = np.random.default_rng(seed)
        return received(make_batch(samples, step_id="s", policy_version=0, num_updates=num_updates, rng=rng), size)

    (whole, messages), (cut, cut_messages) = sent(SAMPLE_CHUNK_BYTES), sent(chunk_bytes)
    assert whole.episode[-1] + 1 == len(samples)
    assert messages == min(num_updates, len(samples)) <= cut_messages
    assert same(whole, cut)
    for rank in RANKS:
        plan, again = (plan_step(each, messages, GrpoSection(), rank) for each in (whole, cut))
        for batches, others in zip([plan.measured, *plan.updates], [again.measured, *again.updates], strict=True):
            assert all(same(a, b) for a, b in zip(batches, others, strict=True))


def test_a_branch_is_a_sequence_of_its_own() -> None:
    ids, mask = [5, 6, 7, 8, 1, 2, 9, 3, 4, 1, 2, 3, 7], [1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0]
    completion = Completion(
        token_ids=array("I", ids),
        logprobs=array("f", range(len(ids))),
        truncated=False,
        oldest_version=0,
        loss_mask=array("B", mask),
        branches=(4, 9),  # in the last one nothing is left to be trained on
    )
    prompt = Prompt(row=0, token_ids=array("I", [1, 2, 3]), answer="")
    sample = Sample(sample_id="g#1", prompt=prompt, completion=completion, advantage=0.5, trainable=True)
    plain = replace(sample, sample_id="g#2", completion=replace(completion, loss_mask=None, branches=()))
    batch = TrainBatch(step_id="s", policy_version=0, updates=((sample, plain),))
    samples, _ = received(batch, SAMPLE_CHUNK_BYTES)
    assert samples.sample_ids == ("g#1", "g#1.1", "g#2")
    assert samples.continues.tolist() == [False, True, False]
    assert samples.prompt_lengths.tolist() == [3, 2, 3]
    assert samples.token_ids.tolist() == [1, 2, 3, 5, 6, 7, 8, 1, 2, 9, 3, 4, 1, 2, 3, *ids]
    assert samples.loss_mask.tolist() == [True, True, False, True, True, False, True, *[True] * len(ids)]
    assert samples.rollout_logprobs.tolist() == [0, 1, 2, 3, 6, 7, 8, *range(len(ids))]
    assert samples.advantages.tolist() == [0.5] * 3


async def test_log_probs_are_where_their_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a branch too; 0 for what it repeats."""
    rng = np.random.default_rng(3)
    samples = random_samples(rng) + [replace(one, sample_id=f"b.{one.sample_id}") for one in random_samples(rng)]
    chunks = list(sample_chunks(samples, chunk_bytes=1, says_episodes=False))
    parts = [merge([chunk], LIMITS) for chunk in chunks]  # each is good by itself

    async def found(self: Trainer, samples: Any, reference: bool) -> Any:
        return np.concatenate([part.rollout_logprobs for part in parts])

    monkeypatch.setattr(Trainer, "_logprobs", found)
    got = iter((await Trainer("localhost:1").logprobs(samples)).tolist())
    num_branches = 0
    for sample in samples:
        completion, bounds = sample.completion, [0, *sample.completion.branches, len(sample.completion.token_ids)]
        num_branches += len(completion.branches)
        mask = list(completion.loss_mask or [1] * len(completion.token_ids))
        for begin, end in pairwise(bounds):
            first = 0 if begin == 0 else next((place for place in range(begin, end) if mask[place]), end)
            for place in range(begin, end):
                trained = any(mask[begin:end]) and place >= first
                assert next(got) == (completion.logprobs[place] if trained else 0.0)
    assert next(got, None) is None
    assert num_branches > 2


def test_an_episode_is_in_one_update() -> None:
    chunks = [
        trainer_pb2.SampleChunk(**_FIELDS | {"sample_ids": [name], "update_index": number, "continues": [number > 0]})
        for number, name in enumerate("ab")
    ]
    with pytest.raises(InvalidRequest, match="sample 'b' continues an episode, and is the first of update 1"):
        merge(chunks, LIMITS)


_FIELDS: dict[str, Any] = {
    "sample_ids": ["a"],
    "prompt_lengths": [1],
    "completion_lengths": [2],
    "advantages": [0.5],
    "trainable": [True],
    "token_ids_u32": bytes(12),
    "rollout_logprobs_f32": bytes(8),
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"token_ids_u32": b"123"},
            r"chunk 3 \(first sample 'a'\): token_ids_u32 has 3 bytes, which is no multiple of 4",
        ),
        ({"token_ids_u32": bytes(8)}, "token_ids has 2 values, its 1 samples need 3"),
        ({"rollout_logprobs_f32": bytes(12)}, "rollout_logprobs has 3 values, its 1 samples need 2"),
        ({"loss_mask_u8": b"\1"}, "loss_mask has 1 values, its 1 samples need 2"),
        ({"continues": [False, True]}, "continues has 2 values, its 1 samples need 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], says: str) -> None:
    check_counts(trainer_pb2.SampleChunk(**_FIELDS), 3)
    with pytest.raises(InvalidRequest, match=says):
        check_counts(trainer_pb2.SampleChunk(**_FIELDS | changes), 3)
