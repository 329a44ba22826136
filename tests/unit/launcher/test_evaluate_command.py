"""What `tandem evaluate` asks for, and the table of its results."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.check.preflight import preflight
from launcher.evaluate import EvaluationOptions, draft_evaluation, of_files
from launcher.run.devices import plan_devices
from launcher.run.processes import Launch, plan_evaluation
from launcher.view.evaluation import evaluation_lines
from tandem_config.loading import draft_config
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import MathVerifyReward
from tests.kit.folders import write_model

MODEL = Path("/models/my model")


CHAT = {"messages": [{"role": "user", "content": "1+2="}], "reward_model": {"ground_truth": "3"}}


def request(**asked: Any) -> EvaluationOptions:
    given: dict[str, Any] = {
        "model": MODEL,
        "data": [],
        "config": None,
        "samples": 1,
        "temperature": None,
        "overrides": [],
    }
    return EvaluationOptions(**given | asked)


def config_of(**asked: Any) -> RunConfig:
    draft = draft_config(asked.get("config"), request(**asked).options())
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
    started = file.read_text() + "trainer: {initial_checkpoint: gone}\n"
    file.write_text(started)
    assert config_of(config=file).trainer.initial_checkpoint is None  # which no trainer reads
    (only,) = config_of(config=file, data=[Path("x.jsonl")]).evaluation_sets()
    assert only.name == "x"


@pytest.mark.parametrize(
    ("row", "overrides", "columns"),
    [
        (CHAT, [], ("messages", "reward_model.ground_truth")),
        ({"question": "1+2=", "solution": 3}, [], ("question", "solution")),
        ({"question": "1+2=", "problem": "a+b=", "answer": 3}, ["data.prompt_key=problem"], ("problem", "answer")),
        ({"question": "1+2="}, ["reward.kind=length", "reward.full_tokens=1"], ("question", None)),
    ],
)
def test_columns_are_found(
    tmp_path: Path, row: dict[str, Any], overrides: list[str], columns: tuple[str, str | None]
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    draft, problems = draft_evaluation(request(data=[tmp_path / "x.jsonl"], overrides=overrides))
    assert draft.config is not None
    assert problems == []
    assert (draft.config.data.prompt_key, draft.config.data.answer_key) == columns


def test_columns_that_cannot_be_told_are_asked_for_as_this_command_takes_them(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"question": "1+2=", "problem": "1+2=", "answer": "3"}')
    _, (problem,) = draft_evaluation(request(data=[file]))
    assert (problem.key, problem.suggestion) == ("--set data.prompt_key", "give --set data.prompt_key=COLUMN")
    file.write_text('{"question": "1+2="}')
    _, (problem,) = draft_evaluation(request(data=[file]))
    assert problem.suggestion.startswith("give --set data.answer_key=COLUMN, or --set reward.function=FILE.py:FUNCTION")


def test_a_configuration_says_the_columns_itself(tmp_path: Path) -> None:
    config, data = tmp_path / "my.yaml", tmp_path / "x.jsonl"
    config.write_text("model: {path: m}\ndata: {train: t.jsonl, prompt_key: said}\n")
    data.write_text(json.dumps(CHAT))
    draft, _ = draft_evaluation(request(data=[data], config=config))
    assert draft.config is not None
    assert draft.config.data.prompt_key == "said"


def data_problems(tmp_path: Path, data: Path) -> list[ConfigProblem]:
    draft, problems = draft_evaluation(request(model=write_model(tmp_path / "model"), data=[data]))
    assert problems == []
    return [problem for problem in of_files(preflight(draft, redis_url=None)) if "x.jsonl" in problem.value]


def test_what_is_wrong_with_a_file_is_said_once_of_data(tmp_path: Path) -> None:
    data = tmp_path / "x.jsonl"
    (problem,) = data_problems(tmp_path, data)
    assert (problem.key, problem.value, problem.where) == ("--data", str(data), "")
    data.write_text('{"prompt": "1+2=", "answer": "3"}\n{"prompt": 3, "answer": "3"}\n')
    (problem,) = data_problems(tmp_path, data)
    assert (problem.key, problem.value) == ("--data", f"{data}:2")


def test_a_name_is_doubted_only_if_no_row_of_the_file_has_the_column(tmp_path: Path) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text('{"prompt": "1+2="}\n{"prompt": "1+2=", "answer": "3"}\n{"prompt": "1+3="}\n')
    config = tmp_path / "my.yaml"
    config.write_text(f"model: {{path: {write_model(tmp_path / 'model')}}}\ndata: {{train: x.jsonl}}\n")
    (problem,) = rows_of(config)
    assert problem.value == f"{data}:1"
    assert problem.message == (
        "has no 'answer', which other rows of the file have: fill it in, or remove the row (and 1 more row with the "
        "same fault: 3)"
    )
    data.write_text('{"prompt": "1+2="}\n')
    (problem,) = rows_of(config)
    assert problem.message.endswith("set data.answer_key to the column's name")


def rows_of(config: Path) -> list[ConfigProblem]:
    found = preflight(draft_config(config, []), redis_url=None)
    return [problem for problem in found if "x.jsonl" in problem.value]


def test_few_rows_are_no_trouble_of_an_evaluation() -> None:
    few = ConfigProblem(key="grpo.prompts_per_iteration", value="64", message="few rows", severity="warning")
    wrong = ConfigProblem(key="grpo.prompts_per_iteration", value="0", message="must be greater than 0")
    assert of_files([few, wrong]) == [wrong]


def test_only_replicas_and_the_evaluator_run(tmp_path: Path) -> None:
    config = config_of(data=[Path("x.jsonl")], overrides=["rollout.replicas=2", "trainer.tensor_parallel=4"])
    launch = Launch(run_id="r", run_dir=tmp_path, redis_url="unix:///r", resume=False)
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
