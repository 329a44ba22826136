from array import array
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learn.updates import make_batch, select_samples, split_updates
from servicekit.rpc.arrays import read_array
from servicekit.rpc.limits import MAX_MESSAGE_BYTES, chunk_starts
from tandem_clients.flow import Completion, Group, Prompt, Sample
from tandem_clients.trainer import sample_chunks, step_requests

RNG = np.random.default_rng(1)


def completion(length: int, *, truncated: bool = False, version: int = 0, mask: str = "") -> Completion:
    return Completion(
        token_ids=array("I", range(100, 100 + length)),
        logprobs=array("f", [-0.5] * length),
        truncated=truncated,
        oldest_version=version,
        loss_mask=array("B", map(int, mask)) if mask else None,
    )


def groups(*lengths: list[int]) -> list[Group]:
    return [
        Group(
            group_id=f"g{i}",
            prompt=Prompt(row=i + 1, token_ids=array("I", list(range(i + 1))), answer=""),
            completions=tuple(completion(length, truncated=length == 9) for length in lengths_G),
        )
        for i, lengths_G in enumerate(lengths)
    ]


def samples_of(some: list[Group]) -> list[Sample]:
    advantages = np.arange(len(some) * len(some[0].completions), dtype=float).reshape(len(some), -1)
    return select_samples(some, advantages, np.zeros(len(some), dtype=bool), truncated="keep")


def test_samples_carry_their_groups_prompt_and_advantage() -> None:
    samples = samples_of(groups([1, 2], [3, 4]))
    assert [(s.sample_id, s.prompt.row, len(s.completion.token_ids), s.advantage) for s in samples] == [
        ("g0#0", 1, 1, 0.0),
        ("g0#1", 1, 2, 1.0),
        ("g1#0", 2, 3, 2.0),
        ("g1#1", 2, 4, 3.0),
    ]


def test_dropped_groups_are_left_out_and_truncated_ones_masked() -> None:
    some = groups([1, 9], [2, 2], [9, 3])
    samples = select_samples(some, np.zeros((3, 2)), np.array([False, True, False]), truncated="mask")
    assert [(s.sample_id, s.trainable) for s in samples] == [
        ("g0#0", True),
        ("g0#1", False),
        ("g2#0", False),
        ("g2#1", True),
    ]
    kept = select_samples(some, np.zeros((3, 2)), np.array([False, True, False]), truncated="keep")
    assert all(s.trainable for s in kept)


def test_samples_without_a_reward_are_left_out() -> None:
    missing = np.array([[False, True], [True, True]])
    samples = select_samples(
        groups([1, 2], [3, 4]), np.zeros((2, 2)), np.zeros(2, dtype=bool), truncated="keep", missing_PG=missing
    )
    assert [s.sample_id for s in samples] == ["g0#0"]


@pytest.mark.parametrize(("samples", "updates"), [(1, 1), (5, 2), (1024, 4), (3, 8), (0, 4)])
def test_updates_share_samples_equally_and_none_is_empty(samples: int, updates: int) -> None:
    parts = split_updates(samples, updates, RNG)
    assert sorted(np.concatenate([*parts, []]).tolist()) == list(range(samples))
    assert len(parts) == min(samples, updates)
    assert all(len(part) >= 1 for part in parts)
    assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_chunks_keep_the_bytes_and_every_sample_once_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 200, size=rng.integers(1, 100)).tolist()
    parts = np.split(np.arange(len(sizes)), chunk_starts(sizes, 150))
    assert np.concatenate(parts).tolist() == list(range(len(sizes)))
    assert all(len(part) == 1 or sum(sizes[i] for i in part) <= 150 for part in parts)
    # Greedy: the next sample would not have fitted.
    for part, after in pairwise(parts):
        assert sum(sizes[i] for i in part) + sizes[after[0]] > 150


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4000))
def test_a_message_is_never_larger_than_asked_for_unless_a_sample_is(seed: int, chunk_bytes: int) -> None:
    """Ids of five bytes as varints, the most that there are; names of any letters; a sample of no tokens too."""
    rng = np.random.default_rng(seed)
    some = [
        Sample(
            sample_id="\N{EURO SIGN}" * rng.integers(40),
            prompt=Prompt(row=1, token_ids=array("I", [2**32 - 1] * rng.integers(60)), answer=""),
            completion=replace(completion(n, mask=("01" * n)[:n]), token_ids=array("I", [2**32 - 1] * n)),
            advantage=-1.5,
            trainable=True,
        )
        for n in rng.integers(0, 60, size=rng.integers(1, 40)).tolist()
    ]
    batch = make_batch(some, step_id="s", policy_version=0, num_updates=2, rng=rng)
    for request in step_requests(batch, chunk_bytes):
        assert request.ByteSize() <= chunk_bytes or len(request.chunk.sample_ids) <= 1


def test_a_real_chunk_is_far_below_the_limit_of_a_message() -> None:
    some = samples_of(groups(*[[4096] * 16] * 16))
    batch = make_batch(some, step_id="s", policy_version=0, num_updates=1, rng=RNG)
    sizes = [request.chunk.ByteSize() for request in step_requests(batch)][1:]
    assert len(sizes) > 2  # 12 MiB at most
    assert max(sizes) <= MAX_MESSAGE_BYTES / 16


def test_the_wire_form_is_flat_and_complete() -> None:
    samples = samples_of(groups([1, 2], [3, 4]))
    batch = make_batch(samples, step_id="s", policy_version=5, num_updates=2, rng=np.random.default_rng(0))
    header, *parts = step_requests(batch)
    assert (header.header.step_id, header.header.policy_version) == ("s", 5)
    assert (header.header.num_updates, header.header.num_samples) == (2, 4)
    seen = {}
    for part in parts:
        chunk, offset, start = part.chunk, 0, 0
        all_ids, all_logprobs = read_array(chunk, "token_ids_u32"), read_array(chunk, "rollout_logprobs_f32")
        for i, sample_id in enumerate(chunk.sample_ids):
            prompt, length = chunk.prompt_lengths[i], chunk.completion_lengths[i]
            tokens = list(all_ids[offset : offset + prompt + length])
            logprobs = list(all_logprobs[start : start + length])
            seen[sample_id] = (tokens, logprobs, chunk.advantages[i], chunk.trainable[i])
            offset, start = offset + prompt + length, start + length
        assert (offset, start) == (len(all_ids), len(all_logprobs))
    assert seen == {
        s.sample_id: ([*s.prompt.token_ids, *s.completion.token_ids], list(s.completion.logprobs), s.advantage, True)
        for s in samples
    }


def test_masks_are_on_the_wire_where_there_are_any() -> None:
    some = samples_of(groups([2, 3], [1, 2]))
    assert not next(sample_chunks(some)).loss_mask_u8
    some[1].completion = completion(3, mask="101")
    (chunk,) = sample_chunks(some)
    assert list(chunk.loss_mask_u8) == [1, 1, 1, 0, 1, 1, 1, 1]
    cut = sample_chunks(some, chunk_bytes=1)  # a message for each sample
    assert [list(chunk.loss_mask_u8) for chunk in cut] == [[], [1, 0, 1], [], []]


def test_shuffling_follows_the_generator() -> None:
    samples = samples_of(groups(*[[1, 2, 3, 4]] * 8))

    def order(seed: int) -> list[str]:
        rng = np.random.default_rng(seed)
        batch = make_batch(samples, step_id="s", policy_version=0, num_updates=4, rng=rng)
        return [sample.sample_id for samples in batch.updates for sample in samples]

    assert order(0) == order(0) != order(1)


def test_fewer_samples_than_updates_announce_fewer_updates() -> None:
    batch = make_batch(samples_of(groups([1, 2])), step_id="s", policy_version=0, num_updates=4, rng=RNG)
    header, *parts = step_requests(batch)
    assert header.header.num_updates == 2
    assert [part.chunk.update_index for part in parts] == [0, 1]


def test_updates_that_divide_prompts_have_whole_groups() -> None:
    samples = samples_of(groups([1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1], [2, 2, 2]))
    kept = [sample for number, sample in enumerate(samples) if number != 4]  # one without a reward

    def updates(num_updates: int, seed: int) -> list[set[str]]:
        rng = np.random.default_rng(seed)
        batch = make_batch(kept, step_id="s", policy_version=0, num_updates=num_updates, rng=rng, divide="prompts")
        return [{sample.sample_id for sample in samples} for samples in batch.updates]

    shares = updates(2, seed=0)
    assert set.union(*shares) == {sample.sample_id for sample in kept}
    prompts = [{sample_id.split("#")[0] for sample_id in share} for share in shares]
    assert sorted(map(len, prompts)) == [2, 3]
    assert not set.intersection(*prompts)
    assert shares == updates(2, seed=0) != updates(2, seed=1)
    assert len(updates(9, seed=0)) == 5
