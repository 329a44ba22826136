"""Dispatch of prompts over replicas, over real gRPC: balance, retries, budgets, malformed replies."""

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest

from coordinator.generate import dispatch
from coordinator.generate.dispatch import Rollouts
from servicekit.errors import InvalidRequest, Unavailable
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import Generation, Order, Prompt, Sampling
from tests.fakes.fake_fleet import FakeFleet, StaticFleet, fake_fleet
from tests.fakes.fake_rollout import FakeRollout, GenerateFault
from tests.kit.folders import EOS, encode

ORDER = Order(
    policy_version=0, num_completions=3, sampling=Sampling(temperature=1.0, max_new_tokens=4, stop_token_ids=(EOS,))
)
PROMPTS = {
    f"g{i}": Prompt(row=i + 1, token_ids=array("I", encode(f"{10 + i}+{20 + i}=")), answer=str(30 + 2 * i))
    for i in range(20)
}


def serving(fleet: FakeFleet) -> None:
    for service in fleet.rollout_services:
        service.state = weights_pb2.REPLICA_STATE_SERVING


def rollouts_of(fleet: FakeFleet, *, max_groups_per_call: int = 1024) -> Rollouts:
    return Rollouts(fleet=StaticFleet(fleet.replicas), max_groups_per_call=max_groups_per_call, timeout_s=1.0)


def sizes(fleet: FakeFleet) -> list[list[int]]:
    return [[len(request.groups) for request in service.requests] for service in fleet.rollout_services]


async def test_groups_come_back_in_order_from_balanced_calls() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        generation = await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert [group.group_id for group in generation.groups] == list(PROMPTS)
    assert [group.prompt.row for group in generation.groups] == list(range(1, 21))
    assert all(len(group.completions) == 3 for group in generation.groups)
    assert sizes(fleet) == [[10], [10]]
    assert generation.engine_s == pytest.approx(0.010)
    request = fleet.rollout_services[0].requests[0]
    assert (request.sampling.top_p, request.sampling.top_k, list(request.sampling.stop_token_ids)) == (1.0, -1, [EOS])


async def seeds_of(seed: int | None, prompts: dict[str, Prompt]) -> dict[str, int | None]:
    async with fake_fleet() as fleet:
        serving(fleet)
        await rollouts_of(fleet).generate(prompts, replace(ORDER, seed=seed))
    groups = [group for service in fleet.rollout_services for request in service.requests for group in request.groups]
    return {group.group_id: group.seed if group.HasField("seed") else None for group in groups}


async def test_seeds_depend_on_the_run_and_the_group_alone() -> None:
    whole, few = await seeds_of(7, PROMPTS), await seeds_of(7, {name: PROMPTS[name] for name in ("g3", "g8")})
    assert len(set(whole.values())) == len(PROMPTS)
    assert few == {name: whole[name] for name in ("g3", "g8")}
    assert not set((await seeds_of(8, PROMPTS)).values()) & set(whole.values())
    assert set((await seeds_of(None, PROMPTS)).values()) == {None}


async def test_a_replica_has_at_most_as_many_groups_as_its_limit() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        await rollouts_of(fleet, max_groups_per_call=6).generate(PROMPTS, ORDER)
    # Four groups come with a response, and as many are sent.
    assert [found[0] for found in sizes(fleet)] == [6, 6]
    assert max(size for found in sizes(fleet) for size in found[1:]) == 4
    assert sum(map(sum, sizes(fleet))) == 20


async def test_calls_stay_below_the_completions_that_a_replica_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{dispatch.__name__}.MAX_COMPLETIONS_PER_CALL", 3 * ORDER.num_completions)
    async with fake_fleet() as fleet:
        serving(fleet)
        await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert [found[0] for found in sizes(fleet)] == [3, 3]


async def test_fewer_prompts_than_replicas() -> None:
    async with fake_fleet(num_replicas=3) as fleet:
        serving(fleet)
        generation = await rollouts_of(fleet).generate({"g0": PROMPTS["g0"]}, ORDER)
    assert len(generation.groups) == 1


async def test_only_unfinished_groups_are_asked_for_again() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        fleet.rollout_services[0].faults.append(GenerateFault(4, Unavailable("socket closed")))
        generation = await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert [group.group_id for group in generation.groups] == list(PROMPTS)
    assert generation.retried_calls == 1
    assert generation.call_errors == ("rollout-0: socket closed",)
    assert sum(map(sum, sizes(fleet))) == 26


async def test_a_replica_that_leaves_finishes_what_it_has_and_gets_no_more() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        leaves = fleet.rollout_services[1]
        members = StaticFleet(fleet.replicas)
        leaves.hold.clear()
        rollouts = Rollouts(fleet=members, max_groups_per_call=5, timeout_s=5.0)
        generating = asyncio.create_task(rollouts.generate(PROMPTS, ORDER))
        await asyncio.wait_for(leaves.asked.wait(), 5.0)
        members.admit(fleet.replicas[:1])
        leaves.hold.set()
        generation = await generating
    assert [group.group_id for group in generation.groups] == list(PROMPTS)
    assert [sum(found) for found in sizes(fleet)] == [15, 5]
    assert len(leaves.requests) == 1
    assert generation.retried_calls == 0


async def test_when_all_leave_the_error_says_so() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        members = StaticFleet(fleet.replicas)
        for service in fleet.rollout_services:
            service.hold.clear()
        rollouts = Rollouts(fleet=members, max_groups_per_call=5, timeout_s=5.0)
        generating = asyncio.create_task(rollouts.generate(PROMPTS, ORDER))
        for service in fleet.rollout_services:
            await asyncio.wait_for(service.asked.wait(), 5.0)
        members.admit([])
        for service in fleet.rollout_services:
            service.hold.set()
        with pytest.raises(
            Unavailable, match=r"10 of 20 groups .*: rollout-0: left the fleet; rollout-1: left the fleet"
        ):
            await generating


async def test_aborted_groups_are_asked_for_again() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        fleet.rollout_services[1].faults.append(GenerateFault(8, abort=True))
        generation = await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert len(generation.groups) == 20
    assert generation.retried_calls == 0  # a pause is no failure
    assert sum(map(sum, sizes(fleet))) == 22


def whole(generation: Generation) -> list[tuple[list[int], list[float], bool, tuple[tuple[int, int], ...]]]:
    return [
        (one.token_ids.tolist(), one.logprobs.tolist(), one.truncated, one.version_spans)
        for group in generation.groups
        for one in group.completions
    ]


@pytest.mark.parametrize("dies", [True, False])
async def test_completions_continue_elsewhere_after_the_tokens_that_they_have(dies: bool) -> None:
    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        undisturbed = await rollouts_of(fleet).generate(PROMPTS, ORDER)
    async with fake_fleet() as fleet:
        serving(fleet)
        error = Unavailable("socket closed") if dies else None
        fleet.rollout_services[0].faults.append(GenerateFault(4, error, abort=not dies, partial=2))
        generation = await rollouts_of(fleet).generate(PROMPTS, ORDER)
        again = [request for service in fleet.rollout_services for request in service.requests]
    samples = [sample for request in again for group in request.groups for sample in group.samples]
    assert {len(sample.token_ids_u32) // 4 for sample in samples} == {2}
    assert len(samples) == 6 * 3
    assert whole(generation) == whole(undisturbed)


@pytest.mark.parametrize("changes", [{"stop": ("x",)}, {"repetition_penalty": 1.1}])
async def test_what_an_engine_looks_for_in_its_own_tokens_begins_anew(changes: dict[str, Any]) -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        fleet.rollout_services[0].faults.append(GenerateFault(4, Unavailable("socket closed"), partial=2))
        order = replace(ORDER, sampling=replace(ORDER.sampling, **changes))
        generation = await rollouts_of(fleet).generate(PROMPTS, order)
    requests = [request for service in fleet.rollout_services for request in service.requests]
    assert not any(sample.token_ids_u32 for each in requests for group in each.groups for sample in group.samples)
    assert all(len(one.token_ids) == len(one.logprobs) for group in generation.groups for one in group.completions)


async def test_finished_completions_of_a_group_are_not_sampled_again() -> None:
    seen: set[str] = set()

    def keep_one(result: rollout_pb2.GroupResult) -> None:
        """Of the first answers."""
        if result.group_id not in seen:
            del result.completions[1:]
        seen.add(result.group_id)

    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        (service,) = fleet.rollout_services
        service.damage = keep_one
        generation = await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert [len(group.completions) for group in generation.groups] == [3] * 20
    asked = [[sample.index for sample in group.samples] for request in service.requests[1:] for group in request.groups]
    assert asked == [[1, 2]] * 20


async def test_what_came_with_a_malformed_completion_counts_for_nothing() -> None:
    """Its first completion has ended by then, and its tokens are no prefix; whole groups of the message are kept."""
    spoilt: list[str] = []

    def spoil(result: rollout_pb2.GroupResult) -> None:
        """One group, the third of the first message."""
        if result.group_id == "g2" and not spoilt:
            spoilt.append(result.group_id)
            _drop_logprob(result)

    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        (service,) = fleet.rollout_services
        undisturbed = await rollouts_of(fleet).generate(PROMPTS, ORDER)
        service.requests.clear()
        service.damage = spoil
        generation = await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert whole(generation) == whole(undisturbed)
    first, again = service.requests
    assert len(first.groups) == 20
    assert {group.group_id for group in again.groups} == PROMPTS.keys() - {"g0", "g1"}
    assert not any(sample.token_ids_u32 for group in again.groups for sample in group.samples)


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("max_new_tokens", [2, 4])
async def test_a_completion_that_has_its_last_token_has_ended_without_word_of_it(
    dies: bool, max_new_tokens: int
) -> None:
    """A pause may abort it, or its replica die, in between; with 2 tokens it is cut off, with 4 its end was sampled."""
    order = replace(ORDER, sampling=replace(ORDER.sampling, max_new_tokens=max_new_tokens))

    def without_word(result: rollout_pb2.GroupResult) -> None:
        for one in result.completions if result.group_id == "g3" else ():
            one.finish_reason = rollout_pb2.FINISH_REASON_UNSPECIFIED if dies else rollout_pb2.FINISH_REASON_ABORT

    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        (service,) = fleet.rollout_services
        undisturbed = await rollouts_of(fleet).generate(PROMPTS, order)
        service.requests.clear()
        service.damage = without_word
        if dies:
            service.faults.append(GenerateFault(20, error=Unavailable("planted")))
        generation = await rollouts_of(fleet).generate(PROMPTS, order)
    assert whole(generation) == whole(undisturbed)
    assert len(service.requests) == 1, "nothing is asked for again"
    assert {one.truncated for group in generation.groups for one in group.completions} == {max_new_tokens == 2}


async def test_a_replica_that_aborts_again_and_again_is_given_up() -> None:
    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        fleet.rollout_services[0].faults.extend([GenerateFault(0, abort=True)] * 100)
        with pytest.raises(Unavailable, match=r"rollout-0: group g\d+ was aborted 10 times"):
            await rollouts_of(fleet).generate(PROMPTS, ORDER)


async def test_a_slow_replica_s_share_goes_to_the_others() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        slow, fast = fleet.rollout_services
        slow.hold.clear()
        slow.kv_tokens = fast.kv_tokens = 2 * (3 * 4 + 6)  # two groups
        generating = asyncio.create_task(rollouts_of(fleet).generate(PROMPTS, ORDER))
        await asyncio.wait_for(slow.asked.wait(), 5.0)
        async with asyncio.timeout(5.0):
            while sum(len(request.groups) for request in fast.requests) < 18:  # noqa: ASYNC110 - a fake's list
                await asyncio.sleep(0.01)
        slow.hold.set()
        generation = await generating
    assert [sum(found) for found in sizes(fleet)] == [2, 18]
    assert len(generation.groups) == 20


def asked_of(service: FakeRollout) -> list[list[tuple[str, int]]]:
    """The completions that each message has asked for."""
    return [
        [
            (group.group_id, index)
            for group in request.groups
            for index in ([sample.index for sample in group.samples] or range(group.num_completions))
        ]
        for request in service.requests
    ]


async def test_completions_of_a_group_are_asked_for_as_there_is_room() -> None:
    prompts = {name: PROMPTS[name] for name in ("g0", "g1", "g2")}
    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        (service,) = fleet.rollout_services
        service.kv_tokens = 5 * 4 + 2 * 6  # five completions of two prompts of 6 tokens
        generation = await rollouts_of(fleet).generate(prompts, ORDER)
        again = await rollouts_of(fleet, max_groups_per_call=64).generate(prompts, ORDER)
    asked = asked_of(service)
    assert asked[0] == [("g0", 0), ("g0", 1), ("g0", 2), ("g1", 0), ("g1", 1)]
    assert sorted(place for message in asked for place in message) == sorted(
        2 * [(name, index) for name in prompts for index in range(3)]
    )
    assert whole(generation) == whole(again)


async def test_one_completion_runs_in_any_case() -> None:
    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        (service,) = fleet.rollout_services
        service.kv_tokens = 1
        generation = await rollouts_of(fleet).generate({"g0": PROMPTS["g0"]}, ORDER)
    assert asked_of(service)[0] == [("g0", 0)]
    assert len(generation.groups[0].completions) == 3


async def test_what_a_failed_stream_has_begun_goes_first() -> None:
    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        (service,) = fleet.rollout_services
        service.kv_tokens = 5 * 4 + 2 * 6
        service.faults.append(GenerateFault(0, Unavailable("socket closed"), partial=2))
        generation = await rollouts_of(fleet).generate(PROMPTS, ORDER)
    first, again, *_ = asked_of(service)
    assert first == again == [("g0", 0), ("g0", 1), ("g0", 2), ("g1", 0), ("g1", 1)]
    assert {len(sample.token_ids_u32) for group in service.requests[1].groups for sample in group.samples} == {2 * 4}
    assert len(generation.groups) == 20


async def test_a_group_in_parts_stays_where_it_is() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        for service in fleet.rollout_services:
            service.kv_tokens = 2 * 4 + 6  # two completions
        await rollouts_of(fleet).generate(PROMPTS, ORDER)
    here, there = [{name for message in asked_of(service) for name, _ in message} for service in fleet.rollout_services]
    assert not here & there


async def test_a_dead_replica_costs_two_calls_and_the_rest_is_done_by_the_others() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        await fleet.servers["rollout-1"].drain(0.0)
        generation = await rollouts_of(fleet, max_groups_per_call=2).generate(PROMPTS, ORDER)
    assert len(generation.groups) == 20
    assert generation.retried_calls == 2
    assert sizes(fleet)[1] == []


async def test_when_every_replica_has_failed_the_error_names_them() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        for service, text in zip(fleet.rollout_services, ("out of memory", "engine died"), strict=True):
            service.faults.extend([GenerateFault(0, Unavailable(text))] * 4)
        with pytest.raises(Unavailable) as caught:
            await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert str(caught.value) == (
        "20 of 20 groups could not be generated, every replica failed: rollout-0: out of memory; rollout-1: engine died"
    )
    assert [len(service.requests) for service in fleet.rollout_services] == [2, 2]


async def test_a_request_that_is_wrong_is_not_repeated() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        fleet.rollout_services[0].faults.append(GenerateFault(0, InvalidRequest("token id 99 is out of range")))
        with pytest.raises(InvalidRequest, match="rollout-0: token id 99"):
            await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert len(fleet.rollout_services[0].requests) == 1


@pytest.mark.parametrize("served", [1, 3])
async def test_a_replica_of_another_version_samples_nothing(served: int) -> None:
    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        fleet.rollout_services[0].policy_version = served
        with pytest.raises(Unavailable, match=f"version 2 to 2 was asked for, {served} is served"):
            await rollouts_of(fleet).generate(PROMPTS, replace(ORDER, policy_version=2))


async def test_a_replica_without_weights_is_told_by_name() -> None:
    async with fake_fleet(num_replicas=1) as fleet:
        with pytest.raises(Unavailable, match="rollout-0: no verified weights"):
            await rollouts_of(fleet).generate(PROMPTS, ORDER)


def _drop_completion(result: rollout_pb2.GroupResult) -> None:
    del result.completions[0]


def _drop_logprob(result: rollout_pb2.GroupResult) -> None:
    result.completions[1].logprobs_f32 = result.completions[1].logprobs_f32[4:]


def _drop_tokens(result: rollout_pb2.GroupResult) -> None:
    result.completions[1].token_ids_u32 = result.completions[1].logprobs_f32 = b""


def _drop_reason(result: rollout_pb2.GroupResult) -> None:
    result.completions[2].finish_reason = 9  # type: ignore[assignment]


def _drop_span(result: rollout_pb2.GroupResult) -> None:
    del result.completions[0].version_spans[:]


def _shorten_mask(result: rollout_pb2.GroupResult) -> None:
    result.completions[2].loss_mask_u8 = b"\1"


def _mask_all(result: rollout_pb2.GroupResult) -> None:
    result.completions[0].loss_mask_u8 = bytes(3)


def _cut_bytes(result: rollout_pb2.GroupResult) -> None:
    result.completions[1].token_ids_u32 = result.completions[1].token_ids_u32[:-1]


def _repeat(result: rollout_pb2.GroupResult) -> None:
    result.completions.append(result.completions[1])


def _rename(result: rollout_pb2.GroupResult) -> None:
    result.group_id = "stranger"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_completion, r"rollout-0: no token came for 1 s"),
        (_drop_logprob, r"completion 1 has 3 tokens and 2 log-probs"),
        (_drop_tokens, r"completion 1 has 0 tokens"),
        (_drop_reason, r"completion 2 was not asked for, or has finish reason 9"),
        (_drop_span, r"version spans do not cover"),
        (_shorten_mask, r"rollout-0: group g\d+, completion 2 has 3 tokens and a loss mask of 1"),
        (_mask_all, r"completion 0: its loss mask leaves none of its 3 tokens to the policy"),
        (_cut_bytes, r"completion 1 has a part of a number"),
        (_repeat, r"rollout-0: group g\d+ has the same completion twice"),
        (_rename, r"'stranger', which was not asked for"),
    ],
)
async def test_malformed_replies_are_refused(damage: object, message: str) -> None:
    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        fleet.rollout_services[0].damage = damage  # type: ignore[assignment]
        with pytest.raises(Unavailable, match=message):
            await rollouts_of(fleet).generate(PROMPTS, ORDER)
