from array import array

import numpy as np
import pytest

from coordinator.flow import Completion, Group, Prompt
from coordinator.learn.batches import Sample, cut_micro_batches, pack, select_samples, split_updates

RNG = np.random.default_rng(1)


def completion(length: int, *, truncated: bool = False, version: int = 0) -> Completion:
    return Completion(
        token_ids=array("I", range(100, 100 + length)),
        logprobs=array("f", [-0.5] * length),
        truncated=truncated,
        oldest_version=version,
    )


def groups(*lengths: list[int]) -> list[Group]:
    return [
        Group(
            group_id=f"g{i}",
            prompt=Prompt(row=i + 1, token_ids=list(range(i + 1)), answer=""),
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


@pytest.mark.parametrize(("samples", "updates"), [(1, 1), (5, 2), (1024, 4), (3, 8), (0, 4)])
def test_updates_share_samples_equally_and_none_is_empty(samples: int, updates: int) -> None:
    parts = split_updates(samples, updates, RNG)
    assert sorted(np.concatenate([*parts, []]).tolist()) == list(range(samples))
    assert len(parts) == min(samples, updates)
    assert all(len(part) >= 1 for part in parts)
    assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_keep_the_budget_and_every_sample_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 200, size=rng.integers(1, 100))
    parts = cut_micro_batches(lengths, 512)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert all(len(part) * lengths[part].max() <= 512 for part in parts)
    # Greedy: the next sample would not have fitted.
    for part in parts[:-1]:
        assert (len(part) + 1) * lengths[part].max() > 512


def test_a_sample_beyond_the_budget_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"a sample of 13 tokens does not fit trainer.max_tokens_per_micro_batch = 12"):
        cut_micro_batches(np.array([3, 13]), 12)


def test_the_wire_form_is_flat_and_complete() -> None:
    samples = samples_of(groups([1, 2], [3, 4]))
    batch = pack(samples, step_id="s", policy_version=5, num_updates=2, max_tokens=12, rng=np.random.default_rng(0))
    header, *parts = list(batch.requests())
    assert (header.header.step_id, header.header.policy_version) == ("s", 5)
    assert (header.header.num_updates, header.header.num_samples) == (2, 4)
    seen = {}
    for part in parts:
        micro, offset, start = part.micro_batch, 0, 0
        for i, sample_id in enumerate(micro.sample_ids):
            prompt, length = micro.prompt_lengths[i], micro.completion_lengths[i]
            tokens = list(micro.token_ids[offset : offset + prompt + length])
            logprobs = list(micro.rollout_logprobs[start : start + length])
            seen[sample_id] = (tokens, logprobs, micro.advantages[i], micro.trainable[i])
            offset, start = offset + prompt + length, start + length
        assert (offset, start) == (len(micro.token_ids), len(micro.rollout_logprobs))
    assert seen == {
        s.sample_id: ([*s.prompt.token_ids, *s.completion.token_ids], list(s.completion.logprobs), s.advantage, True)
        for s in samples
    }


def test_shuffling_follows_the_generator() -> None:
    samples = samples_of(groups(*[[1, 2, 3, 4]] * 8))

    def order(seed: int) -> list[str]:
        rng = np.random.default_rng(seed)
        batch = pack(samples, step_id="s", policy_version=0, num_updates=4, max_tokens=64, rng=rng)
        return [sample_id for micro in batch.micro_batches for sample_id in micro.sample_ids]

    assert order(0) == order(0) != order(1)


def test_fewer_samples_than_updates_announce_fewer_updates() -> None:
    batch = pack(samples_of(groups([1, 2])), step_id="s", policy_version=0, num_updates=4, max_tokens=64, rng=RNG)
    assert batch.num_updates == 2
    assert [micro.update_index for micro in batch.micro_batches] == [0, 1]
