"""Dispatch of prompts over replicas, over real gRPC: balance, retries, budgets, malformed replies."""

import asyncio
from array import array
from dataclasses import replace

import pytest

from coordinator.generate import dispatch
from coordinator.generate.dispatch import Rollouts
from servicekit.errors import InvalidRequest, Unavailable
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import Order, Prompt, Sampling
from tests.fakes.fake_fleet import FakeFleet, StaticFleet, fake_fleet
from tests.fakes.fake_rollout import GenerateFault
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
    return Rollouts(fleet=StaticFleet(fleet.replicas), max_groups_per_call=max_groups_per_call, timeout_s=5.0)


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


async def test_calls_stay_below_the_replicas_limit() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        await rollouts_of(fleet, max_groups_per_call=6).generate(PROMPTS, ORDER)
    assert sorted(size for replica in sizes(fleet) for size in replica) == [5, 5, 5, 5]


async def test_calls_stay_below_the_completions_that_a_replica_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{dispatch.__name__}.MAX_COMPLETIONS_PER_CALL", 3 * ORDER.num_completions)
    async with fake_fleet() as fleet:
        serving(fleet)
        await rollouts_of(fleet).generate(PROMPTS, ORDER)
    assert max(size for replica in sizes(fleet) for size in replica) == 3


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
    assert sorted(size for replica in sizes(fleet) for size in replica) == [6, 10, 10]


async def test_a_replica_that_leaves_finishes_its_call_and_gets_no_other() -> None:
    async with fake_fleet() as fleet:
        serving(fleet)
        stays, leaves = fleet.rollout_services
        members = StaticFleet(fleet.replicas)
        leaves.hold.clear()
        rollouts = Rollouts(fleet=members, max_groups_per_call=5, timeout_s=5.0)
        generating = asyncio.create_task(rollouts.generate(PROMPTS, ORDER))
        await asyncio.wait_for(leaves.asked.wait(), 5.0)
        members.admit(fleet.replicas[:1])
        leaves.hold.set()
        generation = await generating
    assert [group.group_id for group in generation.groups] == list(PROMPTS)
    assert (len(stays.requests), len(leaves.requests)) == (3, 1)
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
    assert generation.retried_calls == 1


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
    result.completions[2].finish_reason = rollout_pb2.FINISH_REASON_UNSPECIFIED


def _drop_span(result: rollout_pb2.GroupResult) -> None:
    del result.completions[0].version_spans[:]


def _shorten_mask(result: rollout_pb2.GroupResult) -> None:
    result.completions[2].loss_mask_u8 = b"\1"


def _mask_all(result: rollout_pb2.GroupResult) -> None:
    result.completions[0].loss_mask_u8 = bytes(3)


def _cut_bytes(result: rollout_pb2.GroupResult) -> None:
    result.completions[1].token_ids_u32 = result.completions[1].token_ids_u32[:-1]


def _send_both(result: rollout_pb2.GroupResult) -> None:
    result.completions[1].logprobs.append(-1.0)


def _rename(result: rollout_pb2.GroupResult) -> None:
    result.group_id = "stranger"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_completion, r"group g\d+ has 2 completions instead of 3"),
        (_drop_logprob, r"completion 1 has 3 tokens and 2 log-probs"),
        (_drop_tokens, r"completion 1 has 0 tokens"),
        (_drop_reason, r"completion 2 has no finish reason"),
        (_drop_span, r"version spans do not cover"),
        (_shorten_mask, r"rollout-0: group g\d+, completion 2 has 3 tokens and a loss mask of 1"),
        (_mask_all, r"completion 0: its loss mask leaves none of its 3 tokens to the policy"),
        (_cut_bytes, r"completion 1: token_ids_u32 has \d+ bytes, which is no multiple of 4"),
        (_send_both, r"completion 1: logprobs and logprobs_f32 are both set; send logprobs_f32 alone"),
        (_rename, r"'stranger', which was not asked for"),
    ],
)
async def test_malformed_replies_are_refused(damage: object, message: str) -> None:
    async with fake_fleet(num_replicas=1) as fleet:
        serving(fleet)
        fleet.rollout_services[0].damage = damage  # type: ignore[assignment]
        with pytest.raises(Unavailable, match=message):
            await rollouts_of(fleet).generate(PROMPTS, ORDER)
