"""What a crash costs, and what the ledger says of it: a sample is trained once, and none is generated again."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from coordinator.app import conduct
from coordinator.ledger.ledger import Ledger
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, InvalidRequest, NotFinite
from tandem_api.rollout.v1 import rollout_pb2
from tandem_clients.flow import TrainBatch
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import list_complete
from tandem_files.ledger.account import Account
from tandem_files.ledger.reading import read_ledger
from tandem_files.ledger.records import (
    FOLDER,
    FORMAT,
    Record,
    framed,
    groups_files,
    read_records,
    segment,
    segments,
    step_files,
)
from tests.contract.coordinator_runs import rows, saved_state, with_settings
from tests.fakes.fake_fleet import FakeFleet, announced_fleet
from tests.fakes.fake_sync import Fault
from tests.fakes.fake_trainer import FakeTrainer
from weightsync.round.phases import PREPARE

SIZE, PROMPTS = 4, 8  # conftest.config
COUNTED = ("begun", "trained", "filtered", "dropped", "returned")


pytestmark = pytest.mark.usefixtures("brief_news")


async def attempt(config: RunConfig, environment: ServiceEnvironment, *, resume: bool = True) -> int:
    return await conduct(config, environment, resume=resume, stop=asyncio.Event())


def asked(fleet: FakeFleet) -> Counter[str]:
    """How often each group of the training was asked for."""
    requests = [request for rollout in fleet.rollout_services for request in rollout.requests]
    return Counter(group.group_id for request in requests for group in request.groups if group.group_id.startswith("i"))


def trained(trainer: FakeTrainer) -> Counter[str]:
    return Counter(sample for step in trainer.steps for chunk in step.chunks for sample in chunk.sample_ids)


def account_of(environment: ServiceEnvironment) -> Account:
    """What the files say, which is what the last process has exported."""
    ledger = read_ledger(environment.run_dir, "t")
    assert ledger.problems == []
    account = ledger.account
    exported = {fate: REGISTRY.get_sample_value("tandem_samples", {"fate": fate}) for fate in ("under_way", *COUNTED)}
    assert exported == {"under_way": account.under_way} | {fate: account.total(fate) for fate in COUNTED}
    return account


@pytest.fixture
def config(config: RunConfig) -> RunConfig:
    return with_settings(config, run={"evaluate_every": 6}, sync={"formation_timeout_s": 1})


def refuse_from(fleet: FakeFleet, group: str) -> None:
    """Let the replica that is asked for a group refuse it, when it has delivered those before it."""

    def check(result: rollout_pb2.GroupResult) -> None:
        if result.group_id.startswith(group):
            raise InvalidRequest("planted")

    for rollout in fleet.rollout_services:
        rollout.groups_per_response, rollout.damage = 1, check


def heal(fleet: FakeFleet) -> None:
    for rollout in fleet.rollout_services:
        rollout.damage = lambda result: None


async def test_a_crash_in_a_generation_costs_no_iteration_and_no_finished_group(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g3.")
        assert await attempt(config, environment, resume=False) == 1
        assert saved_state(environment)["iteration"] == 3
        finished = [name for name, is_finished in account_of(environment).open_groups(4).items() if is_finished]
        assert finished
        before = asked(fleet)
        heal(fleet)
        assert await attempt(config, environment) == 0
        again = asked(fleet) - before
        assert not set(finished) & set(again)
        assert fleet.trainer_service.restored == []
        assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6]
        assert set(trained(fleet.trainer_service).values()) == {1}
    account = account_of(environment)
    assert account.counts["begun"] == 6 * PROMPTS * SIZE
    assert account.counts["trained"] == len(trained(fleet.trainer_service))
    assert (account.under_way, account.counts["returned"]) == (0, 0)


async def test_a_checkpoint_at_the_end_lacks_the_step_that_was_noted_and_not_sent(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, just before a train step."""
    stop, real = asyncio.Event(), Ledger.step

    async def step(ledger: Ledger, iteration: int, batch: TrainBatch) -> None:
        await real(ledger, iteration, batch)
        if batch.step_id.startswith("i4."):
            stop.set()
            await asyncio.Event().wait()

    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        monkeypatch.setattr(Ledger, "step", step)
        await conduct(config, environment, resume=False, stop=stop)
        assert (environment.run_dir / "checkpoints" / "step-00000003").is_dir()
        made = read_ledger(environment.run_dir, "t")
        assert made.checkpoints[3] == saved_state(environment)["steps_digest"]
        assert made.account.position.iteration == 4
        monkeypatch.setattr(Ledger, "step", real)
        assert await attempt(config, environment) == 0
        assert set(trained(fleet.trainer_service).values()) == {1}
    account = account_of(environment)
    assert (account.counts["begun"], account.counts["trained"]) == (
        6 * PROMPTS * SIZE,
        len(trained(fleet.trainer_service)),
    )


@pytest.mark.parametrize("step", [3, 4])
async def test_a_crash_between_a_step_and_its_record_costs_nothing(
    config: RunConfig, environment: ServiceEnvironment, step: int
) -> None:
    """In the iteration after a checkpoint, and later."""
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        # The weights of the step are not taken: too few replicas are left.
        fleet.trainer_service.before_step = fail_sync_after(fleet, step)
        assert await attempt(config, environment, resume=False) == 1
        assert (saved_state(environment)["iteration"], fleet.trainer_service.policy_version) == (step - 1, step)
        before = asked(fleet)
        fleet.trainer_service.before_step = None
        assert await attempt(config, environment) == 0
        assert not [group for group in asked(fleet) - before if group.startswith(f"i{step}.")]
        assert fleet.trainer_service.restored == []
        assert len(fleet.trainer_service.steps) == 6  # one was answered with its first reply
        assert set(trained(fleet.trainer_service).values()) == {1}
        assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6]
    account = account_of(environment)
    assert account.counts["begun"] == 6 * PROMPTS * SIZE
    assert (account.under_way, account.counts["returned"]) == (0, 0)


def fail_sync_after(fleet: FakeFleet, step: int) -> Callable[[int], Awaitable[None]]:
    async def before(number: int) -> None:
        if number == step:
            error = InvalidRequest("planted")
            for rollout in fleet.rollout_services:
                rollout.sync.faults.append(Fault(PREPARE, error))

    return before


async def test_a_lost_trainer_whose_steps_are_not_kept_costs_those_since_the_checkpoint_by_name(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g3.")
        assert await attempt(config, environment, resume=False) == 1
    for path in step_files(environment.run_dir).values():
        path.unlink()
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment) == 0
        again = asked(fleet)
        # Those of iteration 3 were sampled by the checkpoint's policy.
        assert not [group for group in again if group.startswith("i3.")]
        assert [group for group in again if group.startswith("i4.")]
        assert set(again.values()) == {1}
        assert {sample.split(".")[0] for sample in trained(fleet.trainer_service)} == {"i3", "i4", "i5", "i6"}
    account = account_of(environment)
    assert account.counts["returned"] > 0
    assert account.counts["dropped: sampled by a policy that was lost"] == PROMPTS * SIZE
    assert account.counts["begun"] == 7 * PROMPTS * SIZE
    assert account.under_way == 0


async def test_what_nothing_needs_any_more_is_removed(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id):
        assert await attempt(with_settings(config, run={"checkpoint_every": 1}), environment, resume=False) == 0
    # What follows the checkpoints of 4 and 5, which were the newest when the last iteration was done.
    assert list(groups_files(environment.run_dir)) == [5, 6]
    assert min(segments(environment.run_dir)) > 1
    assert account_of(environment).counts["begun"] == 6 * PROMPTS * SIZE


async def test_records_that_find_no_room_wait_and_too_many_end_the_run(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    place = environment.run_dir / FOLDER
    place.write_bytes(b"")  # nothing can be made in it
    config = with_settings(config, run={"missed_checkpoint_budget": 3})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:

        async def make_room(number: int) -> None:
            if number == 2:
                place.unlink()

        fleet.trainer_service.before_step = make_room
        assert await attempt(config, environment, resume=False) == 0
        assert saved_state(environment)["totals"]["warnings"] >= 2
    assert account_of(environment).counts["trained"] == 6 * PROMPTS * SIZE


async def test_a_run_ends_before_a_step_that_too_many_records_lack(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    (environment.run_dir / FOLDER).write_bytes(b"")
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment, resume=False) == 1
        error = saved_state(environment)["error"]
        assert error.startswith("batch: ")
        assert "the ledger's records of 3 steps in a row were not written" in error
        assert "run.missed_checkpoint_budget is 2" in error
        assert len(fleet.trainer_service.steps) == 2


async def test_groups_beyond_their_budget_are_not_kept_and_generated_again(
    config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.ledger.files._MIB", 1)  # so a MiB is a byte
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g3.")
        assert await attempt(with_settings(config, run={"ledger_max_mib": 1}), environment, resume=False) == 1
        heal(fleet)
        assert await attempt(with_settings(config, run={"ledger_max_mib": 1_000_000}), environment) == 0
        assert [count for name, count in asked(fleet).items() if name.startswith("i4.g0.")] == [2]
        assert set(trained(fleet.trainer_service).values()) == {1}
    assert account_of(environment).under_way == 0


async def test_altered_groups_are_generated_again_and_the_others_are_not(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g7.")
        assert await attempt(config, environment, resume=False) == 1
        path = groups_files(environment.run_dir)[4]
        kept = [found.fields["group"] for found in read_records(path) if isinstance(found, Record)]
        content = bytearray(path.read_bytes())
        content[40] ^= 1
        path.write_bytes(content)
        heal(fleet)
        before = asked(fleet)
        assert await attempt(config, environment) == 0
        again = asked(fleet) - before
        assert kept[0] in again
        assert not set(kept[1:]) & set(again)
        assert set(trained(fleet.trainer_service).values()) == {1}


async def test_a_ledger_of_another_run_ends_it_before_anything_is_changed(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    path = segment(environment.run_dir, 1)
    path.parent.mkdir()
    head = {"format": FORMAT, "run_id": "another", "number": 1, "after": 0, "account": Account().snapshot()}
    path.write_bytes(framed(Record(kind="segment", fields=head)))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"is of the ledger of run 'another', and this is run 't'"):
        await attempt(config, environment)
    assert path.read_bytes() == before


async def test_a_setting_that_forbids_it_sends_the_run_back_to_its_checkpoint(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.trainer_service.before_step = fail_sync_after(fleet, 4)
        assert await attempt(config, environment, resume=False) == 1
        fleet.trainer_service.before_step = None
        # The step that was sent would be another one now.
        assert await attempt(with_settings(config, run={"iterations": 7}), environment) == 0
        assert [version for _, version in fleet.trainer_service.restored] == [5]
        assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6, 7]
    assert account_of(environment).under_way == 0


async def test_groups_are_restored_bit_by_bit(config: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(config, run={"checkpoint_every": 3})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.trainer_service.before_step = fail_sync_after(fleet, 4)
        assert await attempt(config, environment, resume=False) == 1
        first = fleet.trainer_service.steps[-1]
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment) == 0
        again = fleet.trainer_service.steps[0]
    assert [step.header.step_id.split(".")[0] for step in (first, again)] == ["i4", "i4"]
    assert again.chunks == first.chunks


async def test_an_iteration_that_fails_with_its_groups_again_and_again_gets_others(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        poison = NotFinite("planted")
        fleet.trainer_service.faults.extend([None, None, poison, poison, poison])
        codes = [await attempt(config, environment, resume=number > 0) for number in range(4)]
        assert codes == [1, 1, 1, 0]
        assert {count for name, count in asked(fleet).items() if name.startswith("i3.")} == {2}
        assert set(trained(fleet.trainer_service).values()) == {1}
    account = account_of(environment)
    assert (account.under_way, account.counts["begun"]) == (0, 6 * PROMPTS * SIZE)


@pytest.mark.parametrize("lost", ["all", "the oldest segment", "a segment", "the end"])
async def test_a_run_continues_with_what_is_left_of_its_ledger(
    config: RunConfig, environment: ServiceEnvironment, lost: str
) -> None:
    """Moved away, or of a release before it; with a hole; torn by a crash."""
    config = with_settings(config, run={"keep_checkpoints": 6})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i6.g3.")
        assert await attempt(config, environment, resume=False) == 1
        heal(fleet)
        found = segments(environment.run_dir)
        if lost == "all":
            shutil.rmtree(environment.run_dir / FOLDER)
        elif lost.endswith("segment"):
            found[min(found) + (lost == "a segment")].unlink()
        else:
            newest = found[max(found)]
            newest.write_bytes(newest.read_bytes()[:-40])
        # Until the segments in which it can be seen are gone.
        longer = with_settings(config, run={"iterations": 12, "keep_checkpoints": 2, "evaluate_every": 12})
        assert await attempt(longer, environment) == 0
        assert lost == "all" or min(segments(environment.run_dir)) > max(found)
        assert fleet.trainer_service.restored == []
        assert [row["iteration"] for row in rows(environment)] == list(range(1, 13))
        assert set(trained(fleet.trainer_service).values()) == {1}
    ledger = read_ledger(environment.run_dir, "t")
    assert ledger.account.under_way == 0
    assert bool(ledger.problems) == (lost != "all")


async def test_a_trainer_at_the_same_version_after_another_step_is_not_taken_for_the_same(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g3.")
        assert await attempt(config, environment, resume=False) == 1
        fleet.trainer_service.step_id = "i3.v2.another"
        heal(fleet)
        assert await attempt(config, environment) == 0
        assert [Path(folder).parent.name for folder, _ in fleet.trainer_service.restored] == ["step-00000002"]


async def test_a_checkpoint_that_a_crash_has_prevented_is_made_up(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, run={"keep_checkpoints": 6})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i6.g3.")
        assert await attempt(config, environment, resume=False) == 1
        (environment.run_dir / "checkpoints" / "step-00000004" / "complete.json").unlink()
        heal(fleet)
        assert await attempt(config, environment) == 0
    # That of 4 cannot be made any more: the policy after 5 has one.
    assert [iteration for iteration, _ in list_complete(environment.run_dir)] == [2, 5, 6]


async def test_a_run_of_another_configuration_begins_where_its_checkpoint_says(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """There is none yet: its state alone must not be taken for the new run's."""
    config = with_settings(config, run={"checkpoint_every": 100})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g3.")
        assert await attempt(config, environment, resume=False) == 1
        heal(fleet)
        assert await attempt(with_settings(config, reward=[{"kind": "math_verify"}]), environment) == 0
        assert [(folder, version > 3) for folder, version in fleet.trainer_service.restored] == [("", True)]
        assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("size", [2, 6])
async def test_groups_of_another_size_are_dropped_by_name(
    config: RunConfig, environment: ServiceEnvironment, size: int
) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g3.")
        assert await attempt(config, environment, resume=False) == 1
        heal(fleet)
        assert await attempt(with_settings(config, grpo={"group_size": size}), environment) == 0
    account = account_of(environment)
    assert account.counts["dropped: other prompts or sampling now"] == PROMPTS * SIZE
    assert account.counts["begun"] == PROMPTS * (4 * SIZE + 3 * size)
    assert account.under_way == 0


async def test_groups_of_another_policy_are_not_restored(config: RunConfig, environment: ServiceEnvironment) -> None:
    """A version alone names them: files that were put there, or a policy that has been restored since."""
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g7.")
        assert await attempt(config, environment, resume=False) == 1
        path = groups_files(environment.run_dir)[4]
        kept = [found for found in read_records(path) if isinstance(found, Record)]
        for record in kept:
            for completion in record.fields["completions"]:
                completion[3] = [[end, 99] for end, _ in completion[3]]
        path.write_bytes(b"".join(map(framed, kept)))
        heal(fleet)
        before = asked(fleet)
        assert await attempt(config, environment) == 0
        assert {record.fields["group"] for record in kept} <= set(asked(fleet) - before)
    assert account_of(environment).under_way == 0


async def test_groups_of_other_prompts_are_not_restored(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        refuse_from(fleet, "i4.g7.")
        assert await attempt(config, environment, resume=False) == 1
        path = groups_files(environment.run_dir)[4]
        kept = [found for found in read_records(path) if isinstance(found, Record)]
        path.write_bytes(
            b"".join(
                framed(Record(kind=record.kind, fields={**record.fields, "order": "other"}, content=record.content))
                for record in kept
            )
        )
        heal(fleet)
        before = asked(fleet)
        assert await attempt(config, environment) == 0
        assert {record.fields["group"] for record in kept} <= set(asked(fleet) - before)
