"""What `tandem evaluate` asks for, and the table of its results."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.evaluate import Asked
from launcher.run.devices import plan_devices
from launcher.run.processes import Launch, plan_evaluation
from launcher.view.evaluation import evaluation_lines
from tandem_config.loading import draft_config
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import MathVerifyReward

MODEL = Path("/models/my model")


def config_of(**asked: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": MODEL,
        "data": [],
        "config": None,
        "samples": 1,
        "temperature": None,
        "overrides": [],
    }
    draft = draft_config(asked.get("config"), Asked(**given | asked).options())
    assert draft.config is not None, draft.problems
    assert not [problem for problem in draft.problems if problem.severity == "error"], draft.problems
    return draft.config


def test_each_file_is_a_set_of_its_own(tmp_path: Path) -> None:
    config = config_of(data=[tmp_path / "test.jsonl", tmp_path / "other" / "test.jsonl", Path("a b.jsonl")])
    assert [each.name for each in config.evaluation_sets()] == ["test", "test-2", "a-b"]
    assert [source.path for source in config.evaluation_sets()[2].data] == [Path.cwd() / "a b.jsonl"]
    assert (config.model.path, config.run.name, config.rollout.serve_model) == (MODEL, "evaluate-my-model", True)


@pytest.mark.parametrize(
    ("samples", "temperature", "sampled_at"), [(1, None, 0.0), (8, None, 1.0), (8, 0.6, 0.6), (1, 0.7, 0.7)]
)
def test_several_samples_are_not_greedy(samples: int, temperature: float | None, sampled_at: float) -> None:
    (each,) = config_of(data=[Path("x.jsonl")], samples=samples, temperature=temperature).evaluation_sets()
    assert (each.samples, each.temperature) == (samples, sampled_at)


def test_a_runs_configuration_brings_its_sets(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("model: {path: m}\ndata: {train: t.jsonl, heldout: h.jsonl}\nreward: {kind: math_verify}\n")
    config = config_of(config=file, overrides=["reward.find_answer=anchored"])
    assert [each.name for each in config.evaluation_sets()] == ["heldout"]
    (reward,) = config.reward
    assert isinstance(reward, MathVerifyReward)
    assert (config.model.path, reward.find_answer) == (MODEL, "anchored")
    assert config_of(config=file, model=None).model.path == tmp_path / "m"
    (only,) = config_of(config=file, data=[Path("x.jsonl")]).evaluation_sets()
    assert only.name == "x"


def test_only_replicas_and_the_evaluator_run(tmp_path: Path) -> None:
    config = config_of(data=[Path("x.jsonl")], overrides=["rollout.replicas=2", "trainer.tensor_parallel=4"])
    launch = Launch(
        run_id="r", run_dir=tmp_path, config_file=tmp_path / "c", redis_url="unix:///r", resume=False, token="t"
    )
    devices = plan_devices(config, ["0", "1"], trainer_ranks=0)
    assert (devices.rollouts, devices.needed) == (("0", "1"), 2)
    specs = plan_evaluation(config, launch, devices)
    assert [spec.name for spec in specs] == ["rollout-0", "rollout-1", "evaluator"]
    assert specs[1].env["CUDA_VISIBLE_DEVICES"] == "1"
    assert specs[2].stage > specs[0].stage


def test_the_table_has_a_line_per_measure() -> None:
    results = json.loads(
        """{"sets": [{"settings": {"name": "aime"}, "num_prompts": 30,
                      "measures": {"mean@2": {"value": 0.5, "low": 0.25, "high": 0.75},
                                   "maj@2": {"value": null, "low": null, "high": null}}}],
            "columns": {"eval/aime/length_mean": 12.25, "eval/aime/truncated_ratio": 0.125}}"""
    )
    assert evaluation_lines(results) == [
        ("aime", "30", "mean@2", "0.500", "0.250 to 0.750", "12.2", "12.5%"),
        ("", "", "maj@2", "-", "- to -", "", ""),
    ]
