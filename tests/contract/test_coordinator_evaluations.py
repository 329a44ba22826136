"""Evaluations of a run: several sets, beside training, baseline, events, the best checkpoint."""

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from coordinator.app import conduct
from launcher.view.compare.runs import read_runs
from launcher.view.summary import summary_lines
from servicekit.environment import ServiceEnvironment
from servicekit.errors import NotFinite
from tandem_api.rollout.v1 import rollout_pb2
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import read_best
from tests.contract.coordinator_runs import launched_again, rows, rows_with_baseline, saved_state, with_settings
from tests.fakes.fake_fleet import FakeFleet, announced_fleet
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.folders import write_data
from tests.kit.waiting import until

SAMPLED = {"name": "sampled", "samples": 4, "temperature": 0.8, "top_p": 0.9, "num_prompts": 10, "every": 3}


def with_sets(config: RunConfig, **evaluation: Any) -> RunConfig:
    """The run with a second, sampled set."""
    path = write_data(config.model.path.parent / "sampled.jsonl", [(a, 30) for a in range(10, 40)])
    return with_settings(config, evaluation={"sets": [SAMPLED | {"data": path}], **evaluation})


async def run(config: RunConfig, environment: ServiceEnvironment, trainer: FakeTrainer | None = None) -> FakeFleet:
    async with announced_fleet(environment.redis_url, environment.run_id, trainer) as fleet:
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    return fleet


def evaluations(fleet: FakeFleet, name: str) -> list[rollout_pb2.GenerateRequest]:
    """Requests of a set, in the order of their versions."""
    asked = [request for replica in fleet.rollout_services for request in replica.requests]
    found = [request for request in asked if request.groups[0].group_id.startswith(f"eval.{name}.")]
    return sorted(found, key=lambda request: request.min_policy_version)


async def test_each_set_is_sampled_and_measured_in_its_own_way(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    fleet = await run(with_sets(config), environment)
    asked = evaluations(fleet, "sampled")
    assert [request.min_policy_version for request in asked] == sorted([0, 3, 6] * 2)
    assert sum(len(request.groups) for request in asked) == 3 * 10
    assert {group.num_completions for request in asked for group in request.groups} == {4}
    assert {(round(r.sampling.temperature, 3), round(r.sampling.top_p, 3)) for r in asked} == {(0.8, 0.9)}
    assert {r.sampling.temperature for r in evaluations(fleet, "heldout")} == {0.0}
    table = rows(environment)
    assert [row.get("eval/sampled/policy_version") for row in table] == [None, None, 3, None, None, 6]
    assert [row.get("eval/heldout/mean@1") for row in table] == [row["heldout_accuracy"] for row in table]
    last = table[-1]
    for measure in ("mean@4", "pass@2", "pass@4", "maj@4"):
        low, value, high = (last[f"eval/sampled/{measure}{end}"] for end in ("_low", "", "_high"))
        assert 0.0 <= low <= value <= high <= 1.0
        labels = {"set": "sampled", "measure": measure}
        assert REGISTRY.get_sample_value("tandem_evaluation", labels) == value
    assert last["eval/sampled/mean@4"] <= last["eval/sampled/pass@2"] <= last["eval/sampled/pass@4"]
    state = saved_state(environment)
    assert state["baseline"]["eval/heldout/mean@1"] == state["initial_accuracy"]
    assert state["baseline"]["eval/sampled/policy_version"] == 0
    summary = json.loads((environment.run_dir / "summary.json").read_text())
    assert summary["evaluation"]["final"]["eval/sampled/mean@4"] == last["eval/sampled/mean@4"]


async def test_an_evaluation_beside_training_is_of_the_policy_that_was_trained_on(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """Each step but the first waits until the replicas have been asked to evaluate the version that it starts from."""
    trainer = FakeTrainer()
    fleets: list[FakeFleet] = []

    async def wait_for_evaluation(step: int) -> None:
        def asked() -> bool:
            return step - 1 in [request.min_policy_version for request in evaluations(fleets[0], "heldout")]

        await asyncio.to_thread(until, asked, what="the evaluation beside the step")

    trainer.before_step = wait_for_evaluation
    config = with_settings(config, run={"evaluate_every": 1, "iterations": 4}, evaluation={"concurrent": True})
    async with announced_fleet(environment.redis_url, environment.run_id, trainer) as fleet:
        fleets.append(fleet)
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    versions = [request.min_policy_version for request in evaluations(fleet, "heldout")]
    assert versions == sorted([0, 1, 2, 3, 4] * 2)
    # The last row has the final policy, whose evaluation nothing follows.
    assert [row.get("eval/heldout/policy_version") for row in rows(environment)] == [None, 1, 2, 4]


async def test_a_run_without_sets_evaluates_nothing(config: RunConfig, environment: ServiceEnvironment) -> None:
    fleet = await run(with_settings(config, data={"heldout": None}, run={"iterations": 2}), environment)
    assert not evaluations(fleet, "")
    assert saved_state(environment)["baseline"] == {}


def checkpoints(environment: ServiceEnvironment) -> list[str]:
    return sorted(path.name for path in (environment.run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("concurrent", [False, True])
async def test_the_best_policy_is_saved_and_kept(
    config: RunConfig, environment: ServiceEnvironment, concurrent: bool
) -> None:
    """The policy gets worse after version 3, at which no checkpoint is due."""
    config = with_settings(
        config,
        run={"iterations": 9, "evaluate_every": 3},
        evaluation={"best": "heldout/mean@1", "concurrent": concurrent},
    )
    trainer = FakeTrainer()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer) as fleet:

        async def forget(step: int) -> None:
            if step == 5:
                for replica in fleet.rollout_services:
                    replica.first_skill, replica.skill_per_version = 0.05, 0.0

        trainer.before_step = forget
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    best = read_best(environment.run_dir)
    assert best is not None
    assert (best.iteration, best.policy_version, best.metric) == (3, 3, "heldout/mean@1")
    assert checkpoints(environment) == ["best.json", "latest", "step-00000003", "step-00000008", "step-00000009"]
    assert json.loads((environment.run_dir / "summary.json").read_text())["evaluation"]["best"]["iteration"] == 3


def test_data_of_sets_is_loaded_before_anything_starts(config: RunConfig, tmp_path: Path) -> None:
    from coordinator.inputs import read_inputs
    from servicekit.errors import ConfigError

    config = with_settings(config, evaluation={"sets": [SAMPLED | {"data": tmp_path / "missing.jsonl"}]})
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        read_inputs(config, tmp_path, resume=False)


async def test_the_baseline_is_row_0(config: RunConfig, environment: ServiceEnvironment) -> None:
    await run(with_settings(with_sets(config), run={"iterations": 2}), environment)
    first, *others = rows_with_baseline(environment)
    assert [row["iteration"] for row in others] == [1, 2]
    assert (first["iteration"], first["policy_version"]) == (0, 0)
    state = saved_state(environment)
    assert first["heldout_accuracy"] == state["initial_accuracy"] == first["heldout_reward/exact_match_mean"]
    assert {name: value for name, value in first.items() if name.startswith("eval/")} == state["baseline"]
    assert not [name for name in first if name in ("reward_mean", "loss", "iteration_s")]


async def test_a_resume_with_another_set_begins_its_baseline_and_best_anew(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_settings(with_sets(config, best="sampled/mean@4"), run={"checkpoint_every": 1})
    stopped = FakeTrainer(faults=deque([None] * 4 + [NotFinite("loss is nan")]))
    async with announced_fleet(environment.redis_url, environment.run_id, stopped):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    before = saved_state(environment)
    former = before["best"]["iteration"]
    assert former == 3
    data = write_data(config.model.path.parent / "hard.jsonl", [(a, 41) for a in range(10, 30)])
    other = with_settings(config, evaluation={"sets": [SAMPLED | {"data": data, "every": 10}]})
    again = launched_again(environment, "again")
    async with announced_fleet(again.redis_url, again.run_id, FakeTrainer(policy_version=4)) as fleet:
        assert await conduct(other, again, resume=True, stop=asyncio.Event()) == 0
    assert {request.min_policy_version for request in evaluations(fleet, "sampled")} == {4, 6}
    assert "evaluation set sampled has changed (prompts: 10 (" in caplog.text
    table, state = rows_with_baseline(again), saved_state(again)
    assert [row["iteration"] for row in table] == [0, 1, 2, 3, 4, 5, 6]
    # The new baseline, of the policy after iteration 4, stands in the next row.
    assert table[5]["eval/sampled/policy_version"] == 4
    assert table[5]["eval/sampled/mean@4"] == state["baseline"]["eval/sampled/mean@4"]
    assert state["baseline"]["eval/heldout/mean@1"] == before["baseline"]["eval/heldout/mean@1"]
    assert state["initial_accuracy"] == before["initial_accuracy"]
    assert state["renewed"] == {"sampled": 4}
    assert state["best"]["iteration"] in (4, 6)
    summary = json.loads((again.run_dir / "summary.json").read_text())
    assert summary["evaluation"]["renewed"] == {"sampled": 4}
    assert f"step-{former:08d}" in checkpoints(again)
    lines = dict(summary_lines(summary, table[1:], again.run_dir))
    assert lines["sampled, mean@4"].endswith("(since iteration 4, when the set was changed)")
    assert "since" not in lines["held-out accuracy"]
    (curves,) = read_runs([again.run_dir])
    assert [number for number, _ in curves.points("eval/sampled/mean@4")] == [4, 5, 6]
    assert [number for number, _ in curves.points("heldout_accuracy")] == [0, 2, 4, 6]
    assert "evaluation set sampled has changed: its figures begin with iteration 4" in curves.troubles


async def test_other_held_out_prompts_do_not_reach_the_target_by_the_old_ones(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    stopped = FakeTrainer(faults=deque([None] * 4 + [NotFinite("loss is nan")]))
    async with announced_fleet(environment.redis_url, environment.run_id, stopped):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    reached = saved_state(environment)["last_accuracy"]
    assert reached > 0.0
    data = write_data(config.model.path.parent / "hard.jsonl", [(a, 41) for a in range(10, 30)])
    other = with_settings(config, data={"heldout": data}, run={"target_accuracy": reached})
    again = launched_again(environment, "again")
    async with announced_fleet(again.redis_url, again.run_id, FakeTrainer(policy_version=4)) as fleet:
        for replica in fleet.rollout_services:
            replica.first_skill, replica.skill_per_version = 0.0, 0.0
        assert await conduct(other, again, resume=True, stop=asyncio.Event()) == 0
    assert saved_state(again)["iteration"] == 6
    assert saved_state(again)["initial_accuracy"] == 0.0
