"""One step off: what is generated during a train step is trained in the next one, once, whatever happens between."""

import asyncio
from collections import deque

import pytest

from coordinator.schedule import sync
from servicekit.environment import ServiceEnvironment
from servicekit.errors import InvalidRequest, NotFinite, Unavailable
from tandem_api.rollout.v1 import rollout_pb2
from tandem_config.schema import RunConfig
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
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer

SIZE, PROMPTS, ITERATIONS = 4, 8, 6  # conftest.config


@pytest.fixture
def config(config: RunConfig) -> RunConfig:
    return with_settings(
        config,
        schedule={"kind": "one_step_off"},
        grpo={"correction": "importance"},
        run={"evaluate_every": 6},
        sync={"formation_timeout_s": 1},
    )


async def test_each_iteration_is_generated_with_the_policy_of_one_version_before(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment, resume=False) == 0
    assert asked(fleet) == {1: {0}, 2: {0}, 3: {1}, 4: {2}, 5: {3}, 6: {4}}
    assert [row["staleness_max"] for row in rows(environment)] == [0, 1, 1, 1, 1, 1]
    counts = trained(fleet.trainer_service)
    assert (len(counts), set(counts.values())) == (ITERATIONS * PROMPTS * SIZE, {1})
    account = account_of(environment)
    assert (account.under_way, account.total("trained")) == (0, ITERATIONS * PROMPTS * SIZE)
    # Like the prompts of a synchronous run, in their order.
    names = [chunk.sample_ids[0].partition("#")[0] for step in fleet.trainer_service.steps for chunk in step.chunks]
    assert {int(name[1:].partition(".")[0]) for name in names} == set(range(1, ITERATIONS + 1))


async def test_the_replicas_generate_while_the_trainer_trains(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:

        async def until_the_next_is_asked_for(step: int) -> None:
            async with asyncio.timeout(10.0):
                while step < 3 and step + 1 not in asked(fleet):  # noqa: ASYNC110 - a fake's list
                    await asyncio.sleep(0.01)

        fleet.trainer_service.before_step = until_the_next_is_asked_for
        assert await attempt(with_settings(config, run={"iterations": 3}), environment, resume=False) == 0
    assert len(fleet.trainer_service.steps) == 3
    assert set(asked(fleet)) == {1, 2, 3}, "nothing is generated for an iteration after the last"


async def test_trainer_and_engine_are_compared_apart_from_time_to_time(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "COMPARE_EVERY", 3)
    trainer = FakeTrainer()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer) as fleet:
        assert await attempt(config, environment, resume=False) == 0
    table = rows(environment)
    assert [row["staleness_max"] for row in table] == [0, 1, 1, 1, 1, 1]
    assert [row["logprob_abs_diff_max"] for row in table] == [1e-6, None, 0.0, None, None, 0.0]
    assert [row["policy_shift_mean"] is None for row in table] == [True, *[False] * 5]
    assert trainer.measured == [(8, False), (8, False)]
    assert set(trained(fleet.trainer_service).values()) == {1}


async def test_another_model_ends_the_run_when_both_are_compared(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "COMPARE_EVERY", 3)
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(own_logprob=-0.5)):
        stops = with_settings(config, grpo={"logprob_diff_stop": 0.1})
        assert await attempt(stops, environment, resume=False) == 1
    assert [row["iteration"] for row in rows(environment)] == [1, 2]


@pytest.mark.parametrize("has_steps", [True, False])
async def test_a_run_that_lost_its_trainer_equals_an_uninterrupted_one(
    config: RunConfig, environment: ServiceEnvironment, has_steps: bool
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment, resume=False) == 0
    whole = [step.chunks for step in fleet.trainer_service.steps]

    folder = environment.run_dir.parent / "second"
    folder.mkdir()
    second = environment.model_copy(update={"run_dir": folder, "run_id": "t2"})
    trainer = FakeTrainer(faults=deque([None, None, None, NotFinite("planted")]))
    async with announced_fleet(second.redis_url, second.run_id, trainer) as fleet:
        assert await attempt(config, second, resume=False) == 1
    assert [row["iteration"] for row in rows(second)] == [1, 2, 3]
    first_part = [step.chunks for step in fleet.trainer_service.steps[:2]]

    for path in step_files(second.run_dir).values() if not has_steps else ():
        path.unlink()
    third = launched_again(second, "t3")
    async with announced_fleet(third.redis_url, third.run_id, FakeTrainer(policy_version=2)) as fleet:
        assert await attempt(config, third) == 0
        again = asked(fleet)
    assert first_part + [step.chunks for step in fleet.trainer_service.steps] == whole
    # The groups of iterations 3 and 4 are of policies up to the checkpoint's: they are restored. Those of 5 are lost
    # with their policy, or not.
    assert set(again) == ({6} if has_steps else {5, 6})
    account = read_ledger(third.run_dir, "t2").account
    assert account.problems == []
    assert (account.under_way, account.total("trained")) == (0, ITERATIONS * PROMPTS * SIZE)
    # Iteration 3 was trained after the checkpoint; the step of 4 was noted, and failed.
    assert account.counts["returned"] == (0 if has_steps else 2) * PROMPTS * SIZE


async def test_a_crash_in_a_generation_ahead_costs_no_finished_group(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    def refuse(result: rollout_pb2.GroupResult) -> None:
        if result.group_id.startswith("i4.g3."):
            raise InvalidRequest("planted")

    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services:
            rollout.groups_per_response, rollout.damage = 1, refuse
        assert await attempt(config, environment, resume=False) == 1
        assert saved_state(environment)["iteration"] == 3, "the iteration that was trained meanwhile is kept"
        finished = [name for name, is_finished in account_of(environment).open_groups(4).items() if is_finished]
        assert finished
        before = groups_asked(fleet)
        for rollout in fleet.rollout_services:
            rollout.damage = lambda result: None
        assert await attempt(config, environment) == 0
        assert not set(finished) & set(groups_asked(fleet) - before)
        assert set(trained(fleet.trainer_service).values()) == {1}
    account = account_of(environment)
    assert account.counts["begun"] == account.total("trained") == ITERATIONS * PROMPTS * SIZE
    assert (account.under_way, account.counts["returned"]) == (0, 0)


async def test_what_fails_beside_the_trainer_is_generated_after_its_step(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """Every replica fails twice, so that the generation ahead gives up; the next one is done with the new policy."""
    left = 4

    def fail(result: rollout_pb2.GroupResult) -> None:
        nonlocal left
        if result.group_id.startswith("i3.g5.") and left:
            left -= 1
            raise Unavailable("planted")

    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services:
            rollout.groups_per_response, rollout.damage = 1, fail
        assert await attempt(config, environment, resume=False) == 0
    assert left == 0
    assert asked(fleet)[3] == {1, 2}
    assert set(trained(fleet.trainer_service).values()) == {1}
    assert [row["staleness_max"] for row in rows(environment)] == [0, 1, 1, 1, 1, 1]
    assert account_of(environment).under_way == 0


async def test_a_stop_waits_for_the_step_and_not_for_the_generation_beside_it(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "COMPARE_EVERY", 3)  # nor for completions that trainer and engine would be compared by
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        await run_until_stopped(config, environment, fleet, step=3, holds=True)
        assert saved_state(environment)["iteration"] == 3
        assert fleet.trainer_service.saved[-1].parent.name == "step-00000003"
        assert await attempt(config, environment) == 0
        assert set(trained(fleet.trainer_service).values()) == {1}
    account = account_of(environment)
    assert (account.under_way, account.total("trained")) == (0, ITERATIONS * PROMPTS * SIZE)


@pytest.mark.parametrize("then", ["sync", "one_step_off"])
async def test_a_resume_may_change_the_schedule(config: RunConfig, environment: ServiceEnvironment, then: str) -> None:
    kinds = ["one_step_off", "sync"] if then == "sync" else ["sync", "one_step_off"]
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for kind, iterations in zip(kinds, (3, 6), strict=True):
            changed = with_settings(config, schedule={"kind": kind}, run={"iterations": iterations})
            assert await attempt(changed, environment, resume=kind == then) == 0
        assert set(trained(fleet.trainer_service).values()) == {1}
    ages = [row["staleness_max"] for row in rows(environment)]
    assert ages == ([0, 1, 1, 0, 0, 0] if then == "sync" else [0, 0, 0, 0, 1, 1])
    account = account_of(environment)
    assert (account.under_way, account.total("trained")) == (0, ITERATIONS * PROMPTS * SIZE)


async def test_groups_begun_ahead_are_dropped_by_name_when_the_schedule_becomes_synchronous(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    def refuse(result: rollout_pb2.GroupResult) -> None:
        if result.group_id.startswith("i4.g3."):
            raise InvalidRequest("planted")

    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        for rollout in fleet.rollout_services:
            rollout.groups_per_response, rollout.damage = 1, refuse
        assert await attempt(config, environment, resume=False) == 1
        for rollout in fleet.rollout_services:
            rollout.damage = lambda result: None
        assert await attempt(with_settings(config, schedule={"kind": "sync"}), environment) == 0
    account = account_of(environment)
    why = "dropped: sampled by an older policy than the schedule trains on"
    assert {name: num for name, num in account.counts.items() if name.startswith("dropped")} == {why: PROMPTS * SIZE}
    assert [row["staleness_max"] for row in rows(environment)][3:] == [0, 0, 0]
    assert (account.under_way, account.total("trained")) == (0, ITERATIONS * PROMPTS * SIZE)


async def test_evaluations_beside_training_are_of_the_current_policy(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, evaluation={"concurrent": True}, run={"evaluate_every": 2})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment, resume=False) == 0
    measured = {row["iteration"]: row.get("eval/heldout/policy_version") for row in rows(environment)}
    assert measured == {1: None, 2: None, 3: 2, 4: None, 5: 4, 6: 6}
    assert set(trained(fleet.trainer_service).values()) == {1}


async def test_what_an_older_policy_sampled_is_not_taken_for_another_model(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer(logprob_diff=0.5)) as fleet:
        stops = with_settings(config, grpo={"logprob_diff_stop": 0.1})
        assert await attempt(stops, environment, resume=False) == 1, "the first iteration is of the current policy"
    assert fleet.trainer_service.policy_version == 1
    assert rows(environment) == []
    own = environment.model_copy(update={"run_dir": environment.run_dir.parent / "second", "run_id": "t2"})
    own.run_dir.mkdir()
    async with announced_fleet(own.redis_url, own.run_id) as fleet:

        async def differ(step: int) -> None:
            fleet.trainer_service.logprob_diff = 0.5 if step > 1 else 1e-6

        fleet.trainer_service.before_step = differ
        assert await attempt(with_settings(config, grpo={"logprob_diff_stop": 0.1}), own, resume=False) == 0
    table = rows(own)
    assert [row["logprob_abs_diff_max"] for row in table] == [1e-6, *[None] * 5]
    assert [row["policy_shift_mean"] is not None for row in table] == [False, *[True] * 5]
    assert all(0.0 <= row["trainer_idle_ratio"] <= 1.0 for row in table)
