"""The real dispatch in virtual time, over replicas that die, return, abort and fill up at random: nothing is lost."""

import asyncio
import os
import random
import resource
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from coordinator.generate.dispatch import Rollouts
from coordinator.generate.joiners import Patience
from coordinator.generate.lane import REST_S
from coordinator.learn.evaluation import BESIDE_REJOIN_S, Evaluator, PromptsToEvaluate
from coordinator.learn.scoring import Scorer
from launcher.simulate.virtual_loop import Deadlock, run
from servicekit.errors import Internal, Unavailable
from servicekit.lifecycle.tasks import cancel
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_clients.flow import Generation, Group, Order, Prompt, Sampling
from tandem_clients.sample_stream import MalformedReply, OpenGroup, SampleStream
from tests.fakes.fake_sampler import STOP, FakeSampler, length_of, token_of

GROUPS, SIZE, MOST = 12, 4, 120
PROMPTS = {f"g{i}": Prompt(row=i, token_ids=array("I", range(1 + i)), answer="") for i in range(GROUPS)}
TOKENS = sum(length_of(name, index, MOST) for name in PROMPTS for index in range(SIZE))


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """The first few seeds, and in the slow tests the others."""
    return pytest.mark.parametrize("seeds", [range(few), pytest.param(range(few, many), marks=pytest.mark.slow)])


class Fleet:
    """Replicas of which some die, and whose next processes join when they are seeded."""

    def __init__(self, rng: random.Random, num: int, kv_tokens: int, turn_tokens: int = 0) -> None:
        self.random, self.kv_tokens, self.turn_tokens = rng, kv_tokens, turn_tokens
        self.members = [self.make(index) for index in range(num)]
        self.gone: list[FakeSampler] = []

    def make(self, index: int) -> FakeSampler:
        speed = self.random.choice([3.0, 10.0, 30.0])
        made = FakeSampler(f"rollout-{index}", self.random, tokens_per_s=speed, kv_tokens=self.kv_tokens)
        made.turn_tokens = self.turn_tokens
        return made

    def serving(self) -> Sequence[FakeSampler]:
        return tuple(self.members)

    async def seed(self, version: int) -> None:
        """The next processes of those that are dead take part."""
        await asyncio.sleep(self.random.uniform(0.1, 3.0))
        for place, member in enumerate(self.members):
            if member.is_dead:
                self.gone.append(member)
                self.members[place] = self.make(place)

    async def trouble(self, kinds: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(0.1))
            member, kind = self.random.choice(self.members), self.random.choice(kinds)
            {"die": member.die, "abort": member.abort, "leave": member.leave}[kind]()

    @property
    def sampled(self) -> int:
        return sum(member.sampled for member in [*self.members, *self.gone])


def order_of(**sampling: object) -> Order:
    settings = Sampling(**{"temperature": 1.0, "max_new_tokens": MOST, "stop_token_ids": (), **sampling})  # type: ignore[arg-type]
    return Order(policy_version=0, num_completions=SIZE, sampling=settings)


async def generate(
    fleet: Fleet, order: Order, kinds: Sequence[str], *, most_groups: int = 1024, answers: "Answers | None" = None
) -> tuple[Generation, Counter[str]]:
    finished: Counter[str] = Counter()

    def note(group: Group) -> None:
        finished[group.group_id] += 1

    patience = Patience(probe_s=5.0, rejoin_s=60.0)
    rollouts = Rollouts(
        fleet=fleet,
        max_groups_per_call=most_groups,
        timeout_s=60.0,
        patience=patience,
        seed=fleet.seed,
        warn=print,
        environments=answers,
    )
    trouble = asyncio.create_task(fleet.trouble(kinds)) if kinds else None
    try:
        return await rollouts.generate(PROMPTS, order, finished=note), finished
    finally:
        if trouble is not None:
            await cancel(trouble)


def check(generation: Generation, finished: Counter[str]) -> None:
    assert [group.group_id for group in generation.groups] == list(PROMPTS)
    assert finished == dict.fromkeys(PROMPTS, 1)
    for group in generation.groups:
        for index, completion in enumerate(group.completions):
            length = length_of(group.group_id, index, MOST)
            assert completion.token_ids.tolist() == [token_of(group.group_id, index, i) for i in range(length)]
            assert (len(completion.logprobs), completion.version_spans) == (length, ((length, 0),))


@seeds(8, 100)
@pytest.mark.parametrize("kinds", [(), ("abort",), ("die",), ("die", "abort", "abort"), ("leave",), ("leave", "abort")])
@pytest.mark.parametrize("kv_tokens", [0, 1, 300, 5000])
def test_every_completion_comes_whole_and_once(kinds: Sequence[str], kv_tokens: int, seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(f"{seed}/{kinds}/{kv_tokens}")
        fleet = Fleet(rng, num=rng.randint(1, 4), kv_tokens=kv_tokens)
        generation, finished = run(generate(fleet, order_of(), kinds, most_groups=rng.choice([1, 3, 1024])))
        check(generation, finished)
        # What was under way when a replica died or aborted, less than a part of each, is sampled again; no more.
        lost = fleet.sampled - TOKENS
        assert lost == 0 or "die" in kinds, lost


def test_tokens_that_come_and_stay_end_the_wait_for_a_replica() -> None:
    """The only one leaves twice while a group takes longer than rejoin_s; it had failed as if none had come."""
    test_every_completion_comes_whole_and_once(("leave",), 1, range(45, 46))


def test_replies_that_are_malformed_again_and_again_end_the_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each completion's tokens come, and its end is wrong: they count for nothing, and no wait begins anew.

    Another replica has left, so that one may still join; the bad one is tried again every 10 s.
    """
    add = SampleStream._add

    def refuse_ends(stream: SampleStream, group: OpenGroup, result: pb.GroupResult) -> list[int]:
        if any(item.finish_reason for item in result.completions):
            raise MalformedReply("its end is wrong")
        return add(stream, group, result)

    async def generated() -> None:
        fleet = Fleet(random.Random(0), num=2, kv_tokens=300)
        asyncio.get_running_loop().call_later(1.0, fleet.members.pop)
        async with asyncio.timeout(3600.0):
            await generate(fleet, order_of(), ())

    monkeypatch.setattr(SampleStream, "_add", refuse_ends)
    with pytest.raises(Unavailable, match="its end is wrong"):
        run(generated())


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_what_runs_on_a_replica_that_leaves_continues_elsewhere_if_it_can(stop: tuple[str, ...]) -> None:
    fleet = Fleet(random.Random(1), num=2, kv_tokens=0)
    stays, leaves = fleet.members
    stays.tokens_per_s = leaves.tokens_per_s = 10.0

    async def leave() -> Generation:
        asyncio.get_running_loop().call_later(1.5, leaves.leave)
        generation, finished = await generate(fleet, order_of(stop=stop), ())
        check(generation, finished)
        return generation

    generation = run(leave())
    assert generation.retried_calls == 0
    assert fleet.sampled == TOKENS
    handed_over = 0 < leaves.sampled < TOKENS / 4
    assert (generation.resumed_tokens > 0, handed_over) == ((False, False) if stop else (True, True))


def test_a_stream_that_breaks_because_its_replica_leaves_is_no_failure() -> None:
    fleet = Fleet(random.Random(1), num=2, kv_tokens=0)
    fleet.members[1].leaves_abruptly = True

    async def leave() -> Generation:
        asyncio.get_running_loop().call_later(1.5, fleet.members[1].leave)
        generation, finished = await generate(fleet, order_of(), ())
        check(generation, finished)
        return generation

    generation = run(leave())
    assert (generation.retried_calls, generation.call_errors) == (0, ())


@pytest.mark.parametrize("lasts_s", [1.0, 15.0])
def test_a_replica_that_was_cut_off_works_again_soon(lasts_s: float) -> None:
    """Both of its streams fail within a moment, and it has the same process afterwards."""
    fleet = Fleet(random.Random(1), num=2, kv_tokens=200)
    stays, cut = fleet.members
    stays.tokens_per_s = cut.tokens_per_s = 3.0
    before: list[int] = []

    async def cut_off() -> Generation:
        loop = asyncio.get_running_loop()
        loop.call_later(1.5, lambda: before.append(cut.sampled))
        loop.call_later(1.5, cut.die)
        loop.call_later(1.5 + lasts_s, setattr, cut, "is_dead", False)
        fleet.seed = nothing_to_seed  # type: ignore[method-assign]
        generation, finished = await generate(fleet, order_of(), ())
        check(generation, finished)
        return generation

    generation = run(cut_off())
    assert generation.retried_calls == (2 if lasts_s < REST_S else 3)
    assert cut.sampled - before[0] > TOKENS / 20


def test_replicas_that_come_back_are_waited_for_by_what_seeds_none() -> None:
    """As an evaluation beside the trainer: both are frozen for a moment."""
    fleet = Fleet(random.Random(1), num=2, kv_tokens=0)

    async def frozen() -> Generation:
        loop = asyncio.get_running_loop()
        for member in fleet.members:
            loop.call_later(1.5, member.die)
        loop.call_later(30.0, setattr, fleet.members[1], "is_dead", False)
        patience = Patience(probe_s=5.0, rejoin_s=60.0)
        rollouts = Rollouts(fleet=fleet, max_groups_per_call=1024, timeout_s=60.0, patience=patience, warn=print)
        return await rollouts.generate(PROMPTS, order_of())

    assert len(run(frozen()).groups) == GROUPS


async def nothing_to_seed(version: int) -> None:
    pass


def test_the_only_replica_finishes_within_its_grace_period_and_then_hands_over() -> None:
    fleet = Fleet(random.Random(1), num=1, kv_tokens=0)
    (leaves,) = fleet.members
    leaves.tokens_per_s = 4.0

    async def leave() -> Generation:
        asyncio.get_running_loop().call_later(1.5, leaves.leave)
        generation, finished = await generate(fleet, order_of(), ())
        check(generation, finished)
        return generation

    generation = run(leave())
    assert leaves.sampled > 4.0 * 20.0
    assert (fleet.sampled, generation.resumed_tokens > 0) == (TOKENS, True)


TURN, CONTEXT = 16, 5


class Answers:
    """Environments that take their time; each answer is of some tokens, until a completion has as many as it may.

    Attributes:
        given: how often each turn was answered: group, index, tokens until then.
        fails: of which turn the answer fails.
        branches: whether some answers begin a branch, which repeats what was held.
    """

    def __init__(
        self,
        rng: random.Random,
        longest_s: float,
        fails: tuple[str, int, int] | None = None,
        *,
        branches: bool = False,
    ) -> None:
        self.random, self.longest_s, self.fails, self.branches = rng, longest_s, fails, branches
        self.given: Counter[tuple[str, int, int]] = Counter()
        self.closed = False

    async def answer(self, group: OpenGroup, index: int) -> "array[int]":
        completion = group.found[index]
        held = group.held(index)[1].tolist()
        assert held[-1] == STOP or completion.truncated
        self.given[group.group_id, index, len(held)] += 1
        await asyncio.sleep(self.random.uniform(0.0, self.longest_s))
        if (group.group_id, index, len(held)) == self.fails:
            raise Internal("environment is broken")
        assert group.held(index)[1].tolist() == held, "nothing is sampled meanwhile"
        if completion.truncated or len(held) + CONTEXT >= length_of(group.group_id, index, MOST):
            return array("I")
        context = [60_000 + len(held)] * CONTEXT
        if self.branches and self.random.random() < 0.5:
            completion.branches += (len(completion.token_ids),)
            context = [*group.prompt.token_ids, *held, *context]
        return array("I", context)

    async def opened(self, prompts: Mapping[str, Prompt]) -> dict[str, Prompt]:
        return dict(prompts)

    def conversations(self) -> "Answers":
        return self

    async def close(self) -> None:
        self.closed = True


def in_turns(group_id: str, index: int) -> tuple[list[int], list[int]]:
    """Ids and mask of a completion with the answers of `Answers`."""
    length = length_of(group_id, index, MOST)
    ids, mask = list[int](), list[int]()
    while len(ids) < length:
        if ids and len(ids) % TURN == 0:
            if len(ids) + CONTEXT >= length:
                break
            ids, mask = ids + [60_000 + len(ids)] * CONTEXT, mask + [0] * CONTEXT
        ids.append(token_of(group_id, index, len(ids), TURN))
        mask.append(1)
    return ids, mask


@seeds(3, 30)
@pytest.mark.parametrize("kinds", [(), ("abort",), ("die",), ("die", "abort", "abort")])
@pytest.mark.parametrize(("kv_tokens", "longest_s"), [(0, 0.1), (300, 20.0), (5000, 200.0)])
@pytest.mark.parametrize("branches", [False, True], ids=["linear", "branches"])
def test_completions_of_several_turns_continue_after_each_answer(
    kinds: Sequence[str], kv_tokens: int, longest_s: float, branches: bool, seeds: range
) -> None:
    for seed in seeds:
        rng = random.Random(f"{seed}/{kinds}/{kv_tokens}/turns")
        fleet = Fleet(rng, num=rng.randint(1, 4), kv_tokens=kv_tokens, turn_tokens=TURN)
        answers = Answers(rng, longest_s, branches=branches)
        order = order_of(stop_token_ids=(STOP,))
        generation, finished = run(generate(fleet, order, kinds, most_groups=rng.choice([1, 3, 1024]), answers=answers))
        assert finished == dict.fromkeys(PROMPTS, 1)
        for group in generation.groups:
            for index, completion in enumerate(group.completions):
                ids, mask = in_turns(group.group_id, index)
                last = completion.token_ids[max((0, *completion.branches)) :].tolist()
                assert last == [*group.prompt.token_ids] * bool(completion.branches) + ids
                if not completion.branches:
                    assert [*(completion.loss_mask or [1] * len(ids))] == mask
                assert completion.version_spans == ((len(completion.token_ids), 0),)
                assert completion.num_sampled == sum(mask)
        assert set(answers.given.values()) == {1}, "a turn was answered twice"
        assert answers.closed
        assert kinds or not generation.resumed_tokens, "behind an answer nothing is resumed"
        assert branches is any(one.branches for group in generation.groups for one in group.completions)


def test_an_answer_that_fails_ends_the_dispatch_with_its_error() -> None:
    name = next(name for name in PROMPTS if length_of(name, 0, MOST) > 2 * TURN)
    fleet = Fleet(random.Random(0), num=2, kv_tokens=0, turn_tokens=TURN)
    answers = Answers(random.Random(0), 1.0, fails=(name, 0, TURN))
    with pytest.raises(Internal, match="environment is broken"):
        run(generate(fleet, order_of(stop_token_ids=(STOP,)), (), answers=answers))
    assert answers.closed


@seeds(8, 100)
def test_what_cannot_continue_begins_anew_and_comes_whole(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        fleet = Fleet(rng, num=2, kv_tokens=300)
        generation, finished = run(generate(fleet, order_of(stop=("x",)), ("abort",)))
        check(generation, finished)


def test_a_replica_has_as_many_tokens_as_its_cache_holds_until_nothing_waits() -> None:
    rng = random.Random(0)
    fleet = Fleet(rng, num=1, kv_tokens=2 * MOST + 3)
    fleet.members[0].calls.clear()
    run(generate(fleet, order_of(), ()))
    assert fleet.members[0].most >= 2
    fleet = Fleet(rng, num=1, kv_tokens=1)
    run(generate(fleet, order_of(), (), most_groups=2))
    assert fleet.members[0].most <= 2 * SIZE


def test_a_group_that_is_submitted_in_parts_brings_its_prompt_once() -> None:
    fleet = Fleet(random.Random(0), num=1, kv_tokens=2 * MOST + 3)
    (sampler,) = fleet.members
    sampler.tokens_per_s = 3.0
    generation, finished = run(generate(fleet, order_of(), ()))
    check(generation, finished)
    # Twice where the second part follows before the replica has accepted the first one.
    assert GROUPS <= sampler.submitted[True] < 1.5 * GROUPS
    assert sampler.submitted[False] >= 8
    assert sampler.most_kept < GROUPS  # those of whole groups are not kept for long


def test_a_fleet_without_any_replica_ends_in_time_with_a_reason() -> None:
    fleet = Fleet(random.Random(0), num=1, kv_tokens=0)
    fleet.members[0].is_dead = True

    async def unseedable(version: int) -> None:
        await asyncio.sleep(1.0)

    fleet.seed = unseedable  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="12 of 12 groups could not be generated"):
        run(generate(fleet, order_of(), ()))


def test_a_wait_for_nothing_is_an_error() -> None:
    with pytest.raises(Deadlock):
        run(asyncio.Event().wait())


def test_an_evaluation_beside_the_trainer_is_given_up_after_a_minute_without_a_replica() -> None:
    """The weights that would bring replicas back wait for its end."""
    fleet = Fleet(random.Random(1), num=1, kv_tokens=0)
    patience = Patience(probe_s=5.0, rejoin_s=600.0)
    rollouts = Rollouts(fleet=fleet, max_groups_per_call=1024, timeout_s=60.0, patience=patience, warn=print)
    evaluator = Evaluator(sets=(), rollouts=rollouts, rollouts_beside_training=rollouts, scorer=cast(Scorer, None))
    asked = PromptsToEvaluate(
        name="heldout",
        prompts=PROMPTS.values(),
        num_prompts=None,
        num_samples=SIZE,
        sampling=order_of().sampling,
        measures=(),
        every=1,
    )

    async def evaluated() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(1.5, fleet.members[0].die)
        with pytest.raises(Unavailable, match="could not be generated"):
            await evaluator.evaluate([asked], 0, beside_training=True)
        return loop.time()

    assert BESIDE_REJOIN_S < run(evaluated()) < BESIDE_REJOIN_S + 15


def test_time_runs_where_a_process_has_many_descriptors_open() -> None:
    """select() takes none beyond 1,023, and a loop's own are the newest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        run(asyncio.sleep(3600.0))
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
