"""Asynchronous: replicas never wait for the trainer, no sample is too old, each is trained once, whatever happens."""

import asyncio
import zlib
from array import array
from collections import deque

import pytest

from coordinator.schedule import asynchronous, sync
from servicekit.environment import ServiceEnvironment
from servicekit.errors import InvalidRequest, NotFinite, TandemError, Unavailable
from servicekit.rpc.arrays import read_array
from tandem_api.common.v1 import common_pb2
from tandem_api.rollout.v1 import rollout_pb2
from tandem_config.schema import ASYNC_DEFAULTS, RunConfig
from tandem_files.ledger.reading import read_ledger
from tandem_files.ledger.records import step_files
from tests.contract.coordinator_runs import (
    account_of,
    asked,
    attempt,
    groups_asked,
    launched_again,
    rows,
    run_until_stopped,
    saved_state,
    trained,
    with_settings,
)
from tests.fakes.fake_fleet import FakeFleet, announced_fleet
from tests.fakes.fake_rollout import FakeRollout
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.waiting import until

SIZE, PROMPTS, ITERATIONS = 4, 8, 6  # conftest.config
MOST_AGE = 3  # S + ceil((W - 1) / P) of the default settings


@pytest.fixture
def config(config: RunConfig) -> RunConfig:
    return with_settings(
        config,
        schedule={"kind": "async"},
        grpo={"correction": "importance"},
        run={"evaluate_every": 6},
        sync={"formation_timeout_s": 1, **ASYNC_DEFAULTS["sync"]},
        evaluation=ASYNC_DEFAULTS["evaluation"],
    )


def check_proven(environment: ServiceEnvironment, fleet: FakeFleet) -> None:
    counts = trained(fleet.trainer_service)
    assert (len(counts), set(counts.values())) == (ITERATIONS * PROMPTS * SIZE, {1})
    account = account_of(environment)
    assert (account.under_way, account.total("trained")) == (0, ITERATIONS * PROMPTS * SIZE)
    assert max(row["staleness_max"] for row in rows(environment)) <= MOST_AGE


async def test_every_sample_is_trained_once_and_young(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment, resume=False) == 0
    check_proven(environment, fleet)
    assert set(asked(fleet)) == set(range(1, ITERATIONS + 1)), "nothing begins that no iteration would train"
    assert [row["trained_samples"] for row in rows(environment)] == [PROMPTS * SIZE] * ITERATIONS


async def test_replicas_generate_as_far_ahead_as_the_pipeline_has_room(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:

        async def until_they_are_ahead(step: int) -> None:
            async with asyncio.timeout(10.0):
                while set(asked(fleet)) < set(range(1, min(step + 2, ITERATIONS) + 1)):  # noqa: ASYNC110 - a fake's list
                    await asyncio.sleep(0.01)
            assert max(asked(fleet)) <= step + 2

        fleet.trainer_service.before_step = until_they_are_ahead
        deep = with_settings(config, schedule={"depth": 2})
        assert await attempt(deep, environment, resume=False) == 0
    check_proven(environment, fleet)


async def test_a_group_that_is_slow_does_not_hold_the_trainer(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """A replica holds what it was given; within the window the other's groups are trained meanwhile."""
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        slow = fleet.rollout_services[0]
        for rollout in fleet.rollout_services:
            rollout.kv_tokens = 16  # a group at a time

        async def hold(step: int) -> None:
            slow.hold.clear() if step == 2 else slow.hold.set()

        fleet.trainer_service.before_step = hold
        wide = with_settings(config, schedule={"window": 1.0})
        run = asyncio.create_task(attempt(wide, environment, resume=False))
        async with asyncio.timeout(30.0):
            assert await run == 0
    counts = trained(fleet.trainer_service)
    assert (len(counts), set(counts.values())) == (ITERATIONS * PROMPTS * SIZE, {1})


async def test_a_long_wait_says_who_waits_for_whom(
    config: RunConfig,
    environment: ServiceEnvironment,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asynchronous, "WORD_S", 0.2)
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services:
            rollout.holds, rollout.kv_tokens = "i4", 16

        async def hold(step: int) -> None:
            if step == 1:
                for rollout in fleet.rollout_services:
                    rollout.hold.clear()

        fleet.trainer_service.before_step = hold
        run = asyncio.create_task(attempt(config, environment, resume=False))
        await asyncio.to_thread(until, lambda: "has waited 0.4 s for its next batch" in caplog.text)
        for rollout in fleet.rollout_services:
            rollout.hold.set()
        assert await run == 0
    (first, second) = [line for line in caplog.messages if "for its next batch" in line][:2]
    assert "0 of 8 groups have come, the oldest that has not is i4.g" in first
    assert "rollout-0 has 2 completions, rollout-1 has 2 completions, 22 groups wait for a replica" in second
    check_proven(environment, fleet)


async def test_a_run_that_lost_its_trainer_loses_no_finished_group_of_a_known_policy(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    faults: deque[TandemError | None] = deque([None, None, None, NotFinite("planted")])
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(faults=faults)) as fleet:
        assert await attempt(config, environment, resume=False) == 1
    assert [row["iteration"] for row in rows(environment)] == [1, 2, 3]
    kept = fleet.trainer_service.steps[:2]
    for path in step_files(environment.run_dir).values():
        path.unlink()

    again = launched_again(environment, "t2")
    async with announced_fleet(again.redis_url, again.run_id, FakeTrainer(policy_version=2)) as fleet:
        assert await attempt(config, again) == 0
        generated = asked(fleet)
    fleet.trainer_service.steps[:0] = kept
    check_proven(again, fleet)
    assert not {1, 2, 3} & generated.keys(), "they are restored"
    assert read_ledger(again.run_dir, "t").account.counts["returned"] == 2 * PROMPTS * SIZE
    assert rows(again)[2]["logprob_abs_diff_max"] == 0.0, "compared after a resume: its samples are older"


async def test_a_crash_of_the_coordinator_costs_no_finished_group(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    def refuse(result: rollout_pb2.GroupResult) -> None:
        if result.group_id.startswith("i4.g3."):
            raise InvalidRequest("planted")

    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services:
            rollout.groups_per_response, rollout.damage = 1, refuse
        assert await attempt(config, environment, resume=False) == 1
        account = account_of(environment)
        finished = [
            name for wave in account.open_waves() for name, is_done in account.open_groups(wave).items() if is_done
        ]
        before = groups_asked(fleet)
        for rollout in fleet.rollout_services:
            rollout.damage = lambda result: None
        assert await attempt(config, environment) == 0
        assert not set(finished) & set(groups_asked(fleet) - before)
        check_proven(environment, fleet)


async def test_a_replica_that_fails_is_tried_again_after_the_next_step(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    left = 2

    def fail(result: rollout_pb2.GroupResult) -> None:
        nonlocal left
        if left and result.group_id.startswith("i"):
            left -= 1
            raise Unavailable("planted")

    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        failing = fleet.rollout_services[0]
        failing.damage = fail
        assert await attempt(config, environment, resume=False) == 0
        check_proven(environment, fleet)
    assert left == 0
    waves = {group.group_id[:2] for request in failing.requests for group in request.groups}
    assert {"i4", "i5", "i6"} & waves
    assert sum(row["retried_calls"] for row in rows(environment)) == 2


async def test_a_stop_waits_for_the_step_and_not_for_the_generation_beside_it(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "COMPARE_EVERY", 3)  # nor for completions that trainer and engine would be compared by
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        await run_until_stopped(config, environment, fleet, step=3, holds=True)
        assert saved_state(environment)["iteration"] == 3
        assert await attempt(config, environment) == 0
        check_proven(environment, fleet)


async def test_tokens_behind_a_flip_are_compared_by_themselves(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "COMPARE_EVERY", 3)

    def begin_with_an_older_version(result: rollout_pb2.GroupResult) -> None:
        """Let each completion have one token of the version before, which no trainer would say so of."""
        for one in result.completions if result.group_id.startswith("i") else ():
            (span,) = one.version_spans
            if span.policy_version:
                one.version_spans.insert(0, common_pb2.VersionSpan(end=1, policy_version=span.policy_version - 1))
                one.logprobs_f32 = array("f", [-50.0]).tobytes() + one.logprobs_f32[4:]

    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services:
            rollout.damage = begin_with_an_older_version
        assert await attempt(with_settings(config, schedule={"depth": 3}), environment, resume=False) == 0
    table = rows(environment)
    measured = {row["iteration"]: row["flip_abs_diff_mean"] for row in table}
    assert measured == {number: 0.0 if number == 3 else None for number in range(1, ITERATIONS + 1)}
    assert all(row["context_age_mean"] >= row["token_age_mean"] for row in table)
    assert table[-1]["context_age_mean"] > table[-1]["token_age_mean"] > 0.0


@pytest.mark.parametrize("first", ["sync", "one_step_off"])
@pytest.mark.parametrize("is_last", [True, False])
async def test_a_resume_may_change_the_schedule(
    config: RunConfig, environment: ServiceEnvironment, first: str, is_last: bool
) -> None:
    kinds = [first, "async"] if is_last else ["async", first]
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        before = with_settings(config, schedule={"kind": kinds[0]})
        await run_until_stopped(before, environment, fleet, step=3)
        assert await attempt(with_settings(config, schedule={"kind": kinds[1]}), environment) == 0
    account = account_of(environment)
    counts = trained(fleet.trainer_service)
    assert (len(counts), set(counts.values())) == (ITERATIONS * PROMPTS * SIZE, {1})
    assert (account.under_way, account.total("trained")) == (0, ITERATIONS * PROMPTS * SIZE)


async def test_a_resume_may_change_the_size_of_iterations(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        await run_until_stopped(config, environment, fleet, step=3)
        for size, iterations in ((3, 9), (12, 12)):
            changed = with_settings(config, grpo={"prompts_per_iteration": size}, run={"iterations": iterations})
            assert await attempt(changed, environment) == 0
    assert set(trained(fleet.trainer_service).values()) == {1}
    account = account_of(environment)
    # Smaller iterations need more steps for what was under way: what is too old then is left out by name.
    assert account.counts["begun"] == account.total("trained") + account.total("filtered")


async def test_evaluations_beside_training_are_of_the_current_policy(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """All replicas are needed, so that the weight sync waits for the evaluation."""
    config = with_settings(config, run={"evaluate_every": 2}, rollout={"min_replicas": 2})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment, resume=False) == 0
    assert evaluated_versions(environment) == {1: None, 2: None, 3: 2, 4: None, 5: 4, 6: 6}
    check_proven(environment, fleet)


def evaluated_versions(environment: ServiceEnvironment) -> dict[int, int | None]:
    return {row["iteration"]: row.get("eval/heldout/policy_version") for row in rows(environment)}


def hold_evaluations(fleet: FakeFleet, *, until_step: int) -> dict[int, list[int]]:
    """Let the last replica not end an evaluation from step 2 to `until_step`; return all versions as steps begin."""
    replica = fleet.rollout_services[-1]
    replica.holds = "eval."
    seen: dict[int, list[int]] = {}

    async def before_step(step: int) -> None:
        seen[step] = [rollout.policy_version for rollout in fleet.rollout_services]
        replica.hold.clear() if 2 <= step < until_step else replica.hold.set()

    fleet.trainer_service.before_step = before_step
    return seen


async def test_a_replica_that_evaluates_keeps_its_policy_and_the_others_train_on(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, run={"evaluate_every": 2})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        seen = hold_evaluations(fleet, until_step=4)
        assert await attempt(config, environment, resume=False) == 0
        versions = [evaluations(rollout) for rollout in fleet.rollout_services]
    assert seen[4] == [3, 2], "it has skipped a weight sync"
    assert evaluated_versions(environment)[4] == 2
    assert not {2, 4} & set(versions[0]), "the others do not evaluate"
    assert {2, 4} <= set(versions[1])
    assert [rollout.policy_version for rollout in fleet.rollout_services] == [ITERATIONS] * 2
    check_proven(environment, fleet)


def evaluations(rollout: FakeRollout) -> list[int]:
    return [
        request.min_policy_version
        for request in rollout.requests
        if any(group.group_id.startswith("eval.") for group in request.groups)
    ]


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_an_evaluation_whose_replicas_fail_is_lost_by_name_and_costs_no_iteration(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Under `sync` it is beside the train step, on all of them."""
    config = with_settings(config, run={"evaluate_every": 2}, schedule={"kind": kind}, sync={"probe_timeout_s": 2.0})

    def fail(result: rollout_pb2.GroupResult) -> None:
        if result.group_id.startswith("eval.") and fleet.rollout_services[1].policy_version == 2:
            raise Unavailable("planted")

    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services if kind == "sync" else fleet.rollout_services[1:]:
            rollout.damage = fail
        assert await attempt(config, environment, resume=False) == 0
    assert "the policy after iteration 2 is not evaluated" in caplog.text
    assert 2 not in evaluated_versions(environment).values()
    check_proven(environment, fleet)


async def test_an_evaluation_that_a_stop_has_cut_off_is_said_to_be_lost(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_settings(config, run={"evaluate_every": 2})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        hold_evaluations(fleet, until_step=4)
        await run_until_stopped(config, environment, fleet, step=3)
        assert "is not evaluated" not in caplog.text
        assert await attempt(config, environment) == 0
    assert "the policy after iteration 2 is not evaluated: the run was stopped before" in caplog.text
    check_proven(environment, fleet)


@pytest.mark.parametrize("stale", ["mask", "drop"])
async def test_tokens_that_are_too_old_are_left_out_and_counted(
    config: RunConfig, environment: ServiceEnvironment, stale: str
) -> None:
    """Each completion of the fake is of one version, so that one of two versions before is left out as a whole."""
    config = with_settings(config, schedule={"stale": stale, "max_token_age": 1})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        steps = fleet.trainer_service.steps

        async def until_ahead(step: int) -> None:
            while step == 1 and 2 not in asked(fleet):  # noqa: ASYNC110 - a fake's list
                await asyncio.sleep(0.01)

        fleet.trainer_service.before_step = until_ahead
        assert await attempt(config, environment, resume=False) == 0
    table, account = rows(environment), account_of(environment)
    left_out = ITERATIONS * PROMPTS * SIZE - sum(row["trained_samples"] for row in table)
    assert account.counts["filtered: older than schedule.max_token_age"] == left_out
    assert account.under_way == 0
    masks = [list(read_array(chunk, "loss_mask_u8")) for step in steps for chunk in step.chunks]
    assert all(all(mask) for mask in masks), "nothing else of them is masked"


async def test_a_group_of_equal_rewards_is_replaced_by_one_other(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    def spoil_one(result: rollout_pb2.GroupResult) -> None:
        if zlib.crc32(result.group_id.encode()) % 2:
            one = result.completions[0]
            one.token_ids_u32 = bytes([one.token_ids_u32[0] ^ 1]) + one.token_ids_u32[1:]

    config = with_settings(config, grpo={"zero_variance": "replace"})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services:
            rollout.first_skill, rollout.damage = 2.0, spoil_one
        assert await attempt(config, environment, resume=False) == 0
    table, account = rows(environment), account_of(environment)
    assert [row["trained_samples"] for row in table] == [PROMPTS * SIZE] * ITERATIONS
    assert set(trained(fleet.trainer_service).values()) == {1}
    left_out = sum(row["dropped_groups"] for row in table)
    assert left_out > 0
    assert account.total("filtered") == left_out * SIZE
    assert account.counts["begun"] == (ITERATIONS * PROMPTS + left_out) * SIZE, "one for each, and none left over"
    assert account.under_way == 0
    assert max(row["staleness_max"] for row in table) <= MOST_AGE


async def test_a_task_without_differences_ends_by_name(config: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(config, grpo={"zero_variance": "replace"})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services:
            rollout.first_skill, rollout.skill_per_version = 2.0, 0.0
        assert await attempt(config, environment, resume=False) == 1
    assert "grpo.zero_variance: replace" in saved_state(environment)["error"]
    account = account_of(environment)
    assert account.counts["begun"] <= 14 * PROMPTS * SIZE
