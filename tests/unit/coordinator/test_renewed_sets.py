"""A resume with another evaluation set: its baseline and best begin anew, those of the others stay, and it is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.inputs import read_inputs
from coordinator.record.resuming import Renewal, reward_facts
from coordinator.record.state import BestPolicy, RunState
from tandem_config.comparing.resuming import mark_of
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import COORDINATOR_FILE, is_kept, keep_checkpoint, list_complete, mark_complete, prune
from tandem_files.checkpoints import step_folder as step
from tandem_files.run_config import RESOLVED_CONFIG
from tests.contract.coordinator_runs import with_settings
from tests.kit.folders import write_data, write_small_model

ROWS = [(a, 11) for a in range(10, 20)]
MEASURED = {"eval/heldout/mean@1": 0.25, "eval/test/mean@4": 0.5, "eval/test/pass@4": 0.75}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    code = tmp_path / "mine.py"
    code.write_text("def right(completion, answer):\n    return 1.0\n\ndef other(completion):\n    return 0.0\n")
    tools = tmp_path / "tools.py"
    tools.write_text("def tool(a: str) -> str: return ''")
    test = {"name": "test", "data": write_data(tmp_path / "test.jsonl", ROWS), "samples": 4, "temperature": 0.8}
    return RunConfig.model_validate(
        {
            "model": {"path": write_small_model(tmp_path / "model")},
            "data": {
                "train": write_data(tmp_path / "train.jsonl", ROWS),
                "heldout": write_data(tmp_path / "heldout.jsonl", ROWS[:4]),
            },
            "reward": [{"kind": "function", "function": f"{code}:right", "accuracy": True}],
            "environment": {"tools": [f"{tools}:tool"]},
            "evaluation": {"sets": [test], "best": "test/mean@4"},
        }
    )


def save(config: RunConfig, run_dir: Path, *, recorded: bool = True) -> None:
    """A checkpoint after iteration 4, whose state has measured both sets."""
    run_dir.mkdir()
    state = read_inputs(config, run_dir, resume=False).state
    state.iteration, state.baseline, state.evaluations = 4, dict(MEASURED), dict(MEASURED)
    state.initial_accuracy, state.last_accuracy, state.best_accuracy = 0.25, 0.5, 0.5
    state.best = BestPolicy(metric="test/mean@4", value=0.9, iteration=2, policy_version=2)
    state.rewards = reward_facts(config)
    if not recorded:
        state.sets = None
    (run_dir / RESOLVED_CONFIG).write_text(dump_resolved(config))
    step(run_dir, 4).mkdir(parents=True)
    state.save(step(run_dir, 4) / COORDINATOR_FILE)
    mark = mark_of(config, "t") | {"model_fingerprint": state.model_fingerprint, "model": str(config.model.path)}
    mark_complete(step(run_dir, 4), iteration=4, **mark)


def resumed(config: RunConfig, run_dir: Path) -> tuple[RunState, Renewal]:
    inputs = read_inputs(config, run_dir, resume=True)
    return inputs.state, inputs.renewal


def setting(**changes: Any) -> Callable[[RunConfig, Path], RunConfig]:
    """Change the set `test`."""

    def changed(config: RunConfig, folder: Path) -> RunConfig:
        return with_settings(config, evaluation={"sets": [config.evaluation.sets[0].model_dump() | changes]})

    return changed


def rows(name: str, problems: list[tuple[int, int]]) -> Callable[[RunConfig, Path], RunConfig]:
    def changed(config: RunConfig, folder: Path) -> RunConfig:
        write_data(folder / name, problems)
        return config

    return changed


def moved(config: RunConfig, folder: Path) -> RunConfig:
    """The same prompts in another file, in another order."""
    path = write_data(folder / "elsewhere.jsonl", ROWS[::-1])
    return setting(data=path)(config, folder)


def other_code(config: RunConfig, folder: Path) -> RunConfig:
    (folder / "mine.py").write_text("def right(completion, answer):\n    return 0.5\n")
    return config


def other_tools(config: RunConfig, folder: Path) -> RunConfig:
    (folder / "tools.py").write_text("def tool(a: str) -> str: return a")
    return config


CHANGES: dict[str, tuple[Callable[[RunConfig, Path], RunConfig], set[str], str]] = {
    "nothing": (lambda config, _: config, set(), ""),
    "the same rows in another file": (moved, set(), ""),
    "as many prompts as there are": (setting(num_prompts=10), set(), ""),
    "when it is evaluated": (setting(every=3), set(), ""),
    "processes of the accuracy": (
        lambda config, _: with_settings(config, reward=[config.reward[0].model_dump() | {"workers": 3}]),
        set(),
        "",
    ),
    "another file's content": (rows("test.jsonl", [*ROWS[:9], (99, 1)]), {"test"}, "prompts: 10 ("),
    "fewer rows": (rows("test.jsonl", ROWS[:9]), {"test"}, "9 ("),
    "held-out rows": (rows("heldout.jsonl", ROWS[2:6]), {"heldout"}, "evaluation set heldout has changed (prompts: 4"),
    "the first prompts only": (setting(num_prompts=5), {"test"}, "5 ("),
    "temperature": (setting(temperature=1.0), {"test"}, "temperature: 0.8 in the checkpoint, 1.0 in the run"),
    "top_p": (setting(top_p=0.5), {"test"}, "top_p"),
    "top_k": (setting(top_k=5), {"test"}, "top_k"),
    "min_p": (setting(min_p=0.5), {"test"}, "min_p"),
    "repetition_penalty": (setting(repetition_penalty=1.5), {"test"}, "repetition_penalty"),
    "its own length": (setting(max_new_tokens=9), {"test"}, "max_new_tokens: 256 in the checkpoint, 9 in the run"),
    "the length of training": (
        lambda config, _: with_settings(config, grpo={"max_new_tokens": 16}),
        {"heldout", "test"},
        "evaluation set heldout has changed (max_new_tokens: 256 in the checkpoint, 16 in the run)",
    ),
    "right_from": (
        lambda config, _: with_settings(config, evaluation={"right_from": 0.5}),
        {"test"},
        "evaluation.right_from: 1.0 in the checkpoint, 0.5 in the run",
    ),
    "the accuracy's code": (other_code, {"heldout", "test"}, "reward right: code of"),
    "the environment's code": (other_tools, {"heldout", "test"}, "environment: code of"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_set_that_has_changed_begins_anew_and_others_stay(config: RunConfig, tmp_path: Path, kind: str) -> None:
    change, renewed, says = CHANGES[kind]
    save(config, tmp_path / "run")
    state, renewal = resumed(change(config, tmp_path), tmp_path / "run")
    kept = {column: value for column, value in MEASURED.items() if column.split("/")[1] not in renewed}
    assert (state.baseline, state.evaluations) == (kept, kept)
    assert state.renewed == dict.fromkeys(renewed, 4)
    accuracies = (state.initial_accuracy, state.last_accuracy, state.best_accuracy)
    assert accuracies == ((None, None, None) if "heldout" in renewed else (0.25, 0.5, 0.5))
    assert (state.best is None, renewal.former_best is None) == ("test" in renewed, "test" not in renewed)
    assert says in " ".join(renewal.messages)
    assert len(renewal.messages) == len(renewed) + ("test" in renewed)
    for name in renewed:
        assert any(name in text and "measured with the policy after iteration 4" in text for text in renewal.messages)


def test_sets_are_added_renamed_and_removed(config: RunConfig, tmp_path: Path) -> None:
    save(config, tmp_path / "run")
    state, renewal = resumed(
        with_settings(
            setting(name="test2")(config, tmp_path),
            data={"heldout": None},
            evaluation={"sets": [config.evaluation.sets[0].model_dump() | {"name": "test2"}], "best": "test2/mean@4"},
        ),
        tmp_path / "run",
    )
    assert (state.baseline, state.renewed, state.best) == ({}, {"test2": 4}, None)
    assert (state.initial_accuracy, state.last_accuracy) == (None, None)
    assert renewal.messages[:3] == [
        "evaluation set heldout is not evaluated any more",
        "evaluation set test is not evaluated any more",
        "evaluation set test2 is new: its baseline is measured with the policy after iteration 4",
    ]
    assert renewal.former_best is not None


def test_another_metric_of_the_best_lets_go_of_the_best_so_far(config: RunConfig, tmp_path: Path) -> None:
    save(config, tmp_path / "run")
    state, renewal = resumed(with_settings(config, evaluation={"best": "heldout/mean@1"}), tmp_path / "run")
    assert (state.best, state.baseline) == (None, MEASURED)
    assert renewal.messages == [
        "evaluation.best is heldout/mean@1 now",
        "the best policy so far, after iteration 2 (test/mean@4 0.900), is compared with no later one; its checkpoint "
        "is kept until you remove its folder",
    ]


@pytest.mark.parametrize(
    ("change", "renewed"),
    [
        (setting(temperature=1.0), {"test"}),
        (lambda config, folder: setting(data=write_data(folder / "more.jsonl", ROWS[:9]))(config, folder), {"test"}),
        (lambda config, _: with_settings(config, grpo={"max_new_tokens": 16}), {"test", "heldout"}),
        # by its name the same file: nothing can be known
        (rows("test.jsonl", ROWS[:9]), set()),
    ],
)
def test_a_checkpoint_of_an_older_release_is_compared_by_the_runs_configuration(
    config: RunConfig, tmp_path: Path, change: Callable[[RunConfig, Path], RunConfig], renewed: set[str]
) -> None:
    save(config, tmp_path / "run", recorded=False)
    state, renewal = resumed(change(config, tmp_path), tmp_path / "run")
    assert set(state.renewed) == renewed
    assert {column.split("/")[1] for column in state.baseline} == {"heldout", "test"} - renewed
    assert renewal.messages[0].startswith("the checkpoint does not say which prompts its evaluation sets had")
    assert state.sets is not None


def test_a_kept_checkpoint_is_not_pruned(tmp_path: Path) -> None:
    for iteration in (2, 4, 6, 8):
        step(tmp_path, iteration).mkdir(parents=True)
        mark_complete(step(tmp_path, iteration), iteration=iteration)
    keep_checkpoint(tmp_path, 2)
    keep_checkpoint(tmp_path, 3)  # is not there
    prune(tmp_path, 2)
    assert [(number, is_kept(folder)) for number, folder in list_complete(tmp_path)] == [
        (2, True),
        (6, False),
        (8, False),
    ]
