"""Stored samples of whole runs over gRPC: complete, replaced after a resume, and never a reason to fail."""

import asyncio
import json
from collections import deque
from pathlib import Path

import pytest

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.errors import NotFinite
from tandem_config.schema import RunConfig
from tandem_files.samples.folder import SampleFolder
from tests.contract.coordinator_runs import launched_again, rows, saved_state, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer


async def run(config: RunConfig, environment: ServiceEnvironment, trainer: FakeTrainer, *, resume: bool = False) -> int:
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        return await conduct(config, environment, resume=resume, stop=asyncio.Event())


async def test_every_iteration_and_evaluation_is_stored_as_it_was_trained(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    assert await run(config, environment, FakeTrainer()) == 0
    folder = SampleFolder(environment.run_dir)
    both = ["train", "heldout"]
    assert folder.iterations() == {0: ["heldout"], 1: ["train"], 2: both, 3: ["train"], 4: both, 5: ["train"], 6: both}
    for row in rows(environment):
        samples = folder.load(row["iteration"], "train", range(32))
        assert sum(sample.reward or 0.0 for sample in samples) / 32 == pytest.approx(row["reward_mean"])
        assert sum(sample.num_tokens for sample in samples) == row["generated_tokens"]
        assert sum(sample.advantage or 0.0 for sample in samples) == pytest.approx(0.0, abs=1e-9)
        assert {sample.policy_version for sample in samples} == {row["iteration"] - 1}
        assert all((sample.completion == f"{sample.answer}<eos>") == (sample.reward == 1.0) for sample in samples)
    heldout = folder.heads(6, "heldout")
    assert sum(head.reward or 0.0 for head in heldout) / len(heldout) == rows(environment)[-1]["heldout_accuracy"]


async def test_samples_name_the_columns_that_rewards_take(
    config: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def score(completion, level, hint=None): return level")
    rows_of_level = [json.dumps({"prompt": f"1+{n}=", "answer": str(1 + n), "level": n, "x": 0}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows_of_level))
    reward = [{"kind": "exact_match"}, {"function": f"{tmp_path}/own.py:score"}]
    data = {"train": str(tmp_path / "rows.jsonl"), "heldout": None}
    assert (
        await run(with_settings(config, reward=reward, data=data, run={"iterations": 1}), environment, FakeTrainer())
        == 0
    )
    samples = SampleFolder(environment.run_dir).load(1, "train", range(32))
    assert {sample.reward_columns for sample in samples} == {("level",)}


async def test_a_resumed_run_leaves_one_set_of_samples(config: RunConfig, environment: ServiceEnvironment) -> None:
    faults: deque[NotFinite | None] = deque([None, None, None, NotFinite("loss is nan")])
    assert await run(config, environment, FakeTrainer(faults=faults)) == 1  # type: ignore[arg-type]
    folder = SampleFolder(environment.run_dir)
    assert list(folder.iterations()) == [0, 1, 2, 3]
    again = launched_again(environment, "again")
    assert await run(config, again, FakeTrainer(policy_version=2), resume=True) == 0
    assert list(folder.iterations()) == [0, 1, 2, 3, 4, 5, 6]
    assert {sample.iteration for sample in folder.load(3, "train", range(32))} == {3}


async def test_a_folder_that_cannot_be_written_costs_a_warning(
    config: RunConfig, environment: ServiceEnvironment, caplog: pytest.LogCaptureFixture
) -> None:
    (environment.run_dir / "samples").write_text("in the way")
    assert await run(config, environment, FakeTrainer()) == 0
    assert saved_state(environment)["status"] == "finished"
    assert caplog.text.count("storing samples failed and is left out from now on: FileExistsError") == 1


async def test_none_are_stored_where_they_are_not_wanted(config: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(config, samples={"enabled": False}, run={"iterations": 1})
    assert await run(config, environment, FakeTrainer()) == 0
    assert not (environment.run_dir / "samples").exists()
