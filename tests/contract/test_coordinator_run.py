"""The coordinator over real gRPC and Redis, with services that have no engines: run, resume, stop, failure."""

import asyncio
import json
import re
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from prometheus_client import REGISTRY

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, NotFinite, TandemError, Unavailable
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.trainer.v1 import trainer_pb2
from tandem_api.weights.v1 import weights_pb2
from tandem_config.schema import RunConfig
from tandem_files.ledger.records import step_files
from tandem_files.run_config import NEXT_CONFIG, RESOLVED_CONFIG
from tandem_files.run_folder import note_launch
from tests.contract.coordinator_runs import launched_again, rows, saved_state, with_settings
from tests.fakes.fake_fleet import FakeFleet, announced_fleet
from tests.fakes.fake_rollout import GenerateFault
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.folders import write_small_model


def fleet_of(
    environment: ServiceEnvironment, trainer: FakeTrainer | None = None
) -> AbstractAsyncContextManager[FakeFleet]:
    return announced_fleet(environment.redis_url, environment.run_id, trainer)


async def test_a_run_leaves_rows_summary_checkpoints_and_a_model(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with fleet_of(environment) as fleet:
        code = await conduct(config, environment, resume=False, stop=asyncio.Event())
    assert code == 0
    table = rows(environment)
    assert [row["iteration"] for row in table] == [1, 2, 3, 4, 5, 6]
    assert [row["policy_version"] for row in table] == [1, 2, 3, 4, 5, 6]
    assert [row["heldout_accuracy"] is not None for row in table] == [False, True, False, True, False, True]
    assert all(row["generated_tokens"] >= 8 * 4 * 3 for row in table)
    assert all(abs(sum_of_times(row)) < 1e-9 for row in table)
    summary = json.loads((environment.run_dir / "summary.json").read_text())
    assert summary["iterations"] == 6
    assert summary["policy_version"] == 6
    assert summary["final_accuracy"] > summary["initial_accuracy"]
    assert summary["trained_samples"] == 6 * 32
    assert summary["weight_sync"]["count"] == 7
    assert summary["weight_sync"]["redundancy"] == 1.0
    assert summary["weight_sync"]["bytes_per_rollout_rank"] == 1024
    assert summary["logprob_abs_diff_max"] == 1e-6
    assert {"sglang", "megatron_core", "torch", "grpcio", "python"} <= set(summary["versions"])
    assert [path.parent.name for path in fleet.trainer_service.saved] == [f"step-{n:08d}" for n in (2, 4, 6)]
    assert sorted(path.name for path in (environment.run_dir / "checkpoints").iterdir()) == [
        "latest",
        "step-00000004",
        "step-00000006",
    ]
    assert (environment.run_dir / "checkpoints" / "latest").read_text() == "step-00000006\n"
    assert fleet.trainer_service.exported == [environment.run_dir / "hf"]
    assert saved_state(environment)["status"] == "finished"


def sum_of_times(row: dict[str, float]) -> float:
    busy = row["iteration_s"] - row["evaluate_s"] - row["checkpoint_s"]
    return busy - row["engine_s"] - row["trainer_compute_s"] - row["overhead_s"]


async def test_a_resumed_run_equals_an_uninterrupted_one(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with fleet_of(environment) as fleet:
        await conduct(config, environment, resume=False, stop=asyncio.Event())
    whole = [step.chunks for step in fleet.trainer_service.steps]

    folder = environment.run_dir.parent / "second"
    folder.mkdir()
    second = environment.model_copy(update={"run_dir": folder, "run_id": "t2"})
    trainer = FakeTrainer(faults=failing_at(4))
    async with fleet_of(second, trainer) as fleet:
        assert await conduct(config, second, resume=False, stop=asyncio.Event()) == 1
    assert [row["iteration"] for row in rows(second)] == [1, 2, 3]
    first_part = [step.chunks for step in fleet.trainer_service.steps[:2]]

    # The services start anew from checkpoint 2, as the real ones do.
    third = launched_again(second, "t3")
    async with fleet_of(third, FakeTrainer(policy_version=2)) as fleet:
        assert await conduct(config, third, resume=True, stop=asyncio.Event()) == 0
    assert [row["iteration"] for row in rows(third)] == [1, 2, 3, 4, 5, 6]
    assert first_part + [step.chunks for step in fleet.trainer_service.steps] == whole


async def test_messages_of_two_weighted_files_are_taken_alike_after_a_resume(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    """Two thirds from one file, one third from another, which begins its third epoch; the first is Parquet."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    sources = [{"path": write_messages(tmp_path / "a.parquet", 20), "weight": 2.0},
               {"path": write_messages(tmp_path / "b.jsonl", 7), "weight": 1.0}]  # fmt: skip
    data = {"train": sources, "heldout": None, "chat_template": template}
    config = with_settings(config, data=data | {"prompt_key": "chat.messages", "answer_key": "chat.sum"})
    async with fleet_of(environment) as fleet:
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert (environment.run_dir / "chat_template.jinja").read_text() == template  # for exports
    whole = [rows_of(step.chunks) for step in fleet.trainer_service.steps]
    # 48 prompts: 32 of a, 16 of b.
    taken = Counter(row for step in whole for row in step)
    assert sum(count for row, count in taken.items() if row.startswith("a.")) == 32 * 4
    assert {count for row, count in taken.items() if row.startswith("b.")} == {2 * 4, 3 * 4}

    second = environment.model_copy(update={"run_dir": tmp_path / "second", "run_id": "t2"})
    second.run_dir.mkdir()
    async with fleet_of(second, FakeTrainer(faults=failing_at(4))) as fleet:
        assert await conduct(config, second, resume=False, stop=asyncio.Event()) == 1
    first_part = [rows_of(step.chunks) for step in fleet.trainer_service.steps[:2]]
    third = launched_again(second, "t3")
    async with fleet_of(third, FakeTrainer(policy_version=2)) as fleet:
        assert await conduct(config, third, resume=True, stop=asyncio.Event()) == 0
    assert first_part + [rows_of(step.chunks) for step in fleet.trainer_service.steps] == whole
    sources[1]["weight"] = 3.0
    with pytest.raises(ConfigError, match=r"data\.train, source 2, weight: 1\.0 in the checkpoint, 3\.0 in the run"):
        await conduct(with_settings(config, data={"train": sources}), third, resume=True, stop=asyncio.Event())


def write_messages(path: Path, count: int) -> Path:
    """Rows of additions, as a user's message after a system's that is empty."""
    roles = [{"role": "system", "content": ""}]
    chats = [
        {"messages": [*roles, {"role": "user", "content": f"{n}+{count}="}], "sum": n + count}
        for n in range(10, 10 + count)
    ]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"chat": chats}), path, row_group_size=3)
    else:
        path.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats), encoding="utf-8")
    return path


def rows_of(chunks: Sequence[trainer_pb2.SampleChunk]) -> list[str]:
    """The rows of a step's samples in order: `a.row3` of `i1.g0.a.row3#2`."""
    return [sample_id.split(".", 2)[2].partition("#")[0] for chunk in chunks for sample_id in chunk.sample_ids]


def failing_at(step: int) -> "deque[TandemError | None]":
    return deque([None] * (step - 1) + [NotFinite("loss of i4.g0.row3#1 is nan")])


@pytest.mark.parametrize(("good_steps", "adopted"), [(0, False), (1, True)])
async def test_a_configuration_becomes_the_runs_when_it_has_trained_an_iteration(
    config: RunConfig, environment: ServiceEnvironment, good_steps: int, adopted: bool
) -> None:
    note_launch(environment.run_dir, environment.run_id)
    (environment.run_dir / RESOLVED_CONFIG).write_text("old")
    (environment.run_dir / NEXT_CONFIG).write_text("new")
    async with fleet_of(environment, FakeTrainer(faults=failing_at(good_steps + 1))):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert (environment.run_dir / RESOLVED_CONFIG).read_text() == ("new" if adopted else "old")
    assert (environment.run_dir / NEXT_CONFIG).exists() is not adopted


@pytest.mark.parametrize("num_long", [0, 2])
async def test_prompts_that_are_left_out_are_told(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture, num_long: int
) -> None:
    """In every way of running: in the log, as a metric, and as an event (test_coordinator_service.py watches those)."""
    config = with_settings(config, data={"max_prompt_tokens": 7, "overlong_prompts": "drop"}, run={"iterations": 1})
    with config.data.train[0].path.open("a", encoding="utf-8") as data:
        data.writelines('{"prompt": "1111+2222=", "answer": "3333"}\n' for _ in range(num_long))
    before = REGISTRY.get_sample_value("tandem_warnings_total", {"kind": "dropped_prompts"}) or 0.0
    async with fleet_of(environment):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    warned = (REGISTRY.get_sample_value("tandem_warnings_total", {"kind": "dropped_prompts"}) or 0.0) - before
    assert (warned, "2 prompts of data.train were dropped" in caplog.text) == ((1, True) if num_long else (0, False))
    assert REGISTRY.get_sample_value("tandem_dropped_prompts", {"data": "train"}) == num_long
    assert REGISTRY.get_sample_value("tandem_dropped_prompts", {"data": "heldout"}) == 0


async def test_a_failing_service_ends_the_run_by_name(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with fleet_of(environment, FakeTrainer(faults=failing_at(1))):
        code = await conduct(config, environment, resume=False, stop=asyncio.Event())
    assert code == 1
    state = saved_state(environment)
    assert state["status"] == "failed"
    assert state["error"] == "trainer: loss of i4.g0.row3#1 is nan"
    assert not (environment.run_dir / "summary.json").exists()


async def test_a_missing_service_is_named(config: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(config, run={"startup_timeout_s": 0.2})
    assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert "trainer" in saved_state(environment)["error"] or "rollout-0" in saved_state(environment)["error"]


async def test_a_stop_signal_interrupts_at_once(config: RunConfig, environment: ServiceEnvironment) -> None:
    stop = asyncio.Event()
    async with fleet_of(environment) as fleet:
        for service in fleet.rollout_services:
            service.hold.clear()
        running = asyncio.create_task(conduct(config, environment, resume=False, stop=stop))
        await asyncio.wait_for(fleet.rollout_services[0].asked.wait(), 10)
        stop.set()
        assert await asyncio.wait_for(running, 10) == 0
        for service in fleet.rollout_services:
            service.hold.set()
    assert saved_state(environment)["status"] == "interrupted"
    assert not (environment.run_dir / "checkpoints").exists()


async def test_a_trainer_of_another_version_is_refused(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with fleet_of(environment, FakeTrainer(policy_version=3)):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert "policy version 3, this run begins at 0" in saved_state(environment)["error"]


@pytest.mark.parametrize(("trained", "served", "has_steps"), [(2, 4, False), (2, 5, True), (4, 4, True), (3, 1, True)])
async def test_a_restarted_run_takes_over_services_that_are_ahead_of_its_checkpoint(
    config: RunConfig, environment: ServiceEnvironment, trained: int, served: int, has_steps: bool
) -> None:
    """Checkpoint 2 of six iterations; a trainer that was restarted from it, or one that lives; replicas that live.

    Without the steps since then, or with a replica that is ahead of them.
    """
    async with fleet_of(environment, FakeTrainer(faults=failing_at(4))):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    for path in step_files(environment.run_dir).values() if not has_steps else ():
        path.unlink()
    again = launched_again(environment, "again")
    async with fleet_of(again, FakeTrainer(policy_version=trained)) as fleet:
        for service in fleet.rollout_services:
            service.state, service.policy_version = weights_pb2.REPLICA_STATE_SERVING, served
        assert await conduct(config, again, resume=True, stop=asyncio.Event()) == 0
    beyond = max(trained, served) + 1
    folder = environment.run_dir / "checkpoints" / "step-00000002" / "trainer"
    assert fleet.trainer_service.restored == [(str(folder), beyond)]
    assert fleet.rollout_services[0].sync.seen[0][0].startswith(f"v{beyond}-")
    assert [row["iteration"] for row in rows(again)] == [1, 2, 3, 4, 5, 6]
    assert [row["policy_version"] for row in rows(again)] == [1, 2, *range(beyond + 1, beyond + 5)]


async def test_other_reward_code_after_a_resume_is_told(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    code = tmp_path / "rewards.py"
    code.write_text("def one(completion):\n    return 1.0\n")
    own = with_settings(config, reward=[{"kind": "function", "function": f"{code}:one"}])
    async with fleet_of(environment, FakeTrainer(faults=failing_at(4))):
        assert await conduct(own, environment, resume=False, stop=asyncio.Event()) == 1
    code.write_text("def one(completion):\n    return 0.5\n")
    for run_id, number in (("second", 1), ("third", 0)):
        again, longer = launched_again(environment, run_id), {"iterations": 6 if number else 8}
        caplog.clear()
        async with fleet_of(again, FakeTrainer(policy_version=2 if number else 7)):
            assert await conduct(with_settings(own, run=longer), again, resume=True, stop=asyncio.Event()) == 0
        assert caplog.text.count("the scores before and after this resume do not compare") == number
    assert f"reward one: code of {code}" in saved_state(environment)["rewards"]


@pytest.mark.parametrize("name", ["coordinator.json", "complete.json", "trainer/version"])
async def test_a_damaged_checkpoint_is_skipped_and_said_everywhere(
    config: RunConfig, environment: ServiceEnvironment, name: str
) -> None:
    checkpoints = environment.run_dir / "checkpoints"
    async with fleet_of(environment, FakeTrainer(faults=failing_at(6))):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    damaged = checkpoints / "step-00000004" / name
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:] if len(content) > 2 else b"9")
    again = launched_again(environment, "again")
    async with fleet_of(again, FakeTrainer(policy_version=2)):
        assert await conduct(config, again, resume=True, stop=asyncio.Event()) == 0
    assert [row["iteration"] for row in rows(again)] == [1, 2, 3, 4, 5, 6]
    told = "the checkpoint of iteration 4 is damaged ("
    for place in (saved_state(again), json.loads((again.run_dir / "summary.json").read_text())):
        (text,) = place["damaged_checkpoints"]
        assert text.startswith(told)
        assert text.endswith("resuming from iteration 2")
        assert name.rpartition("/")[2] in text
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        "damaged-step-00000004",
        "latest",
        "step-00000004",
        "step-00000006",
    ]


async def test_other_data_is_refused_by_name(config: RunConfig, environment: ServiceEnvironment) -> None:
    async with fleet_of(environment):
        await conduct(config, environment, resume=False, stop=asyncio.Event())
    other = with_settings(config, run={"seed": 3}, data={"shuffle": False})
    with pytest.raises(ConfigError, match=r"run\.seed: 0 in .*, 3 in the run; data\.shuffle: True in .*, False"):
        await conduct(other, environment, resume=True, stop=asyncio.Event())


async def test_a_restarted_run_without_a_checkpoint_begins_with_the_initial_model(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with fleet_of(environment, FakeTrainer(policy_version=1)) as fleet:
        assert await conduct(config, environment, resume=True, stop=asyncio.Event()) == 0
    assert fleet.trainer_service.restored == [("", 2)]
    assert [row["policy_version"] for row in rows(environment)] == [3, 4, 5, 6, 7, 8]


async def test_a_checkpoint_of_another_model_is_refused(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    async with fleet_of(environment):
        await conduct(config, environment, resume=False, stop=asyncio.Event())
    other = with_settings(config, model={"path": write_small_model(tmp_path / "wider", hidden=16)})
    with pytest.raises(ConfigError, match=r"of another model: it was made from .*/model .*wider"):
        await conduct(other, environment, resume=True, stop=asyncio.Event())


async def test_a_used_run_folder_is_refused(config: RunConfig, environment: ServiceEnvironment) -> None:
    (environment.run_dir / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(ConfigError, match=r"already holds a run: continue it with --resume"):
        await conduct(config, environment, resume=False, stop=asyncio.Event())


async def test_the_run_stops_early_at_its_target(config: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(config, run={"iterations": 100, "evaluate_every": 1, "target_accuracy": 0.6})
    async with fleet_of(environment):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    table = rows(environment)
    assert len(table) < 20
    assert table[-1]["heldout_accuracy"] >= 0.6
    assert (environment.run_dir / "checkpoints" / f"step-{len(table):08d}" / "complete.json").exists()


async def test_groups_of_a_failed_call_are_generated_elsewhere(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_of(environment) as fleet:
        # Call 1 is the first evaluation.
        fleet.rollout_services[0].faults.extend([None, GenerateFault(2, Unavailable("socket closed"))])
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert [row["retried_calls"] for row in rows(environment)] == [1, 0, 0, 0, 0, 0]
    said = "1 generate call failed, and what was left continued: rollout-0: socket closed"
    assert said in caplog.text


async def test_dropping_every_group_skips_the_step_and_the_sync(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(config, grpo={"zero_variance": "drop"}, run={"iterations": 2})
    async with fleet_of(environment) as fleet:
        for service in fleet.rollout_services:
            service.first_skill, service.skill_per_version = 0.0, 0.0
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert [(row["dropped_groups"], row["loss"], row["policy_version"]) for row in rows(environment)] == [
        (8, None, 0),
        (8, None, 0),
    ]
    assert fleet.trainer_service.steps == []


async def test_a_lost_train_reply_is_asked_for_again_and_trains_once(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    async with fleet_of(environment, FakeTrainer(lost_replies=1)) as fleet:
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert fleet.trainer_service.policy_version == 6
    assert [row["policy_version"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6]


async def test_nothing_to_train_on_has_a_budget(config: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(config, grpo={"zero_variance": "drop"}, run={"iterations": 50})
    async with fleet_of(environment) as fleet:
        for service in fleet.rollout_services:
            service.first_skill, service.skill_per_version = 0.0, 0.0
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert "11 iterations in a row had nothing to train on" in saved_state(environment)["error"]


async def test_samples_of_an_older_policy_are_not_trained_on(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    def backdate(result: rollout_pb2.GroupResult) -> None:
        result.completions[-1].version_spans[0].policy_version = 0

    async with fleet_of(environment) as fleet:
        for service in fleet.rollout_services:
            service.damage = backdate
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert "8 samples are older than version 1; the first is i2.g0.row" in saved_state(environment)["error"]
    assert len(fleet.trainer_service.steps) == 1


async def test_held_out_completions_that_are_not_scored_are_counted_like_those_of_training(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """Held-out answers alone begin with a 4 (32 to 43); there this pattern takes 2^40 steps."""
    reward = {"kind": "regex", "pattern": r"4\d(?:|){40}x|(\d+)", "timeout_s": 0.05, "workers": 1}
    config = with_settings(config, reward=reward, run={"iterations": 2, "evaluate_every": 2})
    before = timeouts("heldout")
    async with fleet_of(environment) as fleet:
        for service in fleet.rollout_services:
            service.first_skill = 0.6
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    first, second = rows(environment)
    assert (first["heldout_scored_completions"], first["heldout_reward_timeouts"]) == (None, None)
    assert (second["heldout_scored_completions"], second["heldout_reward_errors"]) == (40, 0)
    late = second["heldout_reward_timeouts"]
    assert 5 <= late <= 10
    assert (second["scored_completions"], second["reward_timeouts"]) == (32, 0)
    # The evaluation before the first iteration has no row, but it counts.
    counts = json.loads((environment.run_dir / "summary.json").read_text())["counts"]
    assert counts["heldout_reward_timeouts"] == timeouts("heldout") - before
    assert late < counts["heldout_reward_timeouts"] <= 20
    assert (counts["reward_timeouts"], counts["warnings"]) == (0, 3)
    (trouble,) = saved_state(environment)["troubles"]
    share = f"{late / 40:.1%} of the completions of the last held-out evaluation"
    assert trouble == f"{share} took longer than reward.timeout_s to score."


OWN_REWARD = """
import os, time
def score(num_tokens, sample_id, columns, prompt):
    assert columns["prompt"] == prompt
    where, _, number = sample_id.partition(".row")
    first = number.endswith("#0")
    if where == "i1.g0" and first: raise KeyError("odd sample")
    if where == "i2.g1" and first: time.sleep(60)
    if where == "i3.g2" and first: os._exit(9)
    if where == "i3.g3" and first: print("looked at", sample_id)
    return num_tokens
"""


async def test_own_rewards_that_fail_cost_their_samples_only(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(OWN_REWARD)
    own = {"function": f"{tmp_path}/own.py:score", "name": "own", "weight": 0.5, "on_error": "drop", "timeout_s": 0.5}
    rewards = [{"kind": "exact_match"}, own]
    config = with_settings(config, reward=rewards, run={"iterations": 4, "evaluate_every": 4})
    async with fleet_of(environment) as fleet:
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    table = rows(environment)
    assert [(row["dropped_samples"], row["reward_errors"], row["trained_samples"]) for row in table] == [
        *[(1, 1, 31)] * 3,
        (0, 0, 32),
    ]
    for row in table:
        assert row["reward/own_mean"] >= 3.0 - 0.5
        assert row["reward_mean"] == pytest.approx(row["reward/exact_match_mean"] + 0.5 * row["reward/own_mean"])
        assert row["reward/own_std"] is not None
    assert table[-1]["heldout_accuracy"] == table[-1]["heldout_reward/exact_match_mean"]
    trained = [{name for chunk in step.chunks for name in chunk.sample_ids} for step in fleet.trainer_service.steps]
    assert [len(names) for names in trained] == [31, 31, 31, 32]
    assert not any(name.startswith("i1.g0.") and name.endswith("#0") for name in trained[0])
    for why in ("KeyError: odd sample (own.py:7)", "took longer than timeout_s = 0.5 s", "exited with status 9"):
        assert re.search(
            rf"1 completions, which are left out; first: own of i\d\.g\d\.row\d+#0: .*{re.escape(why)}", caplog.text
        )
    assert re.search(r"looked at i3\.g3\.row\d+#0", caplog.text)
    summary = json.loads((environment.run_dir / "summary.json").read_text())
    assert (summary["counts"]["dropped_samples"], summary["counts"]["reward_errors"]) == (3, 3)
    labels = {"data": "train", "reward": "own"}
    assert REGISTRY.get_sample_value("tandem_reward_score_mean", labels) == table[-1]["reward/own_mean"]


@pytest.mark.parametrize(
    ("level", "why"),
    [
        ({}, r"^reward\[1\]: .*own.py:score takes 'level', which nothing fills.*columns: prompt, answer"),
        ({"level": 2}, r"rows.jsonl:7: has no 'level', which the reward score takes"),
    ],
)
async def test_a_reward_that_cannot_work_is_found_before_any_service_is_called(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path, level: dict[str, int], why: str
) -> None:
    (tmp_path / "own.py").write_text("def score(completion, level): return 1")
    lines = [json.dumps({"prompt": "1+2=", "answer": "3"} | (level if place != 6 else {})) for place in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    rewards = [{"kind": "exact_match"}, {"function": f"{tmp_path}/own.py:score"}]
    data = {"train": str(tmp_path / "rows.jsonl"), "heldout": None}
    with pytest.raises(ConfigError, match=why):
        await conduct(with_settings(config, reward=rewards, data=data), environment, resume=False, stop=asyncio.Event())


def timeouts(data: str) -> float:
    return REGISTRY.get_sample_value("tandem_reward_timeouts_total", {"data": data}) or 0.0
