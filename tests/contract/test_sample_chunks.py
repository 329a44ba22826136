"""What the coordinator sends and what the trainer makes of it: where the stream is cut changes no number of a step."""

from array import array
from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learn.updates import make_batch
from servicekit.rpc.limits import SAMPLE_CHUNK_BYTES
from tandem_clients.flow import Completion, Prompt, Sample, TrainBatch
from tandem_clients.trainer import step_requests
from tandem_config.schema import GrpoSection
from trainer_service.micro_batches.checks import Limits, check_updates
from trainer_service.micro_batches.merge import merge
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

    return [
        Sample(
            sample_id=f"i1.g{i // 4}.row{i}#{i % 4}",
            prompt=Prompt(row=i, token_ids=rng.integers(0, 1000, rng.integers(1, 30)).tolist(), answer=""),
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
    assert messages == min(num_updates, len(samples)) <= cut_messages
    assert same(whole, cut)
    for rank in RANKS:
        plan, again = (plan_step(each, messages, GrpoSection(), rank) for each in (whole, cut))
        for batches, others in zip([plan.measured, *plan.updates], [again.measured, *again.updates], strict=True):
            assert all(same(a, b) for a, b in zip(batches, others, strict=True))
