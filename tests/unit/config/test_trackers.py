"""The section `trackers`: a list that may be empty, whose entries may be a name alone."""

from pathlib import Path

import pytest

from tandem_config.loading import draft_config, dump_resolved, load_config
from tandem_config.sections.trackers import TensorboardTracker, WandbTracker

MINIMAL = "model: {path: m}\ndata: {train: rows.jsonl}\n"
BOTH = "trackers: [tensorboard, {kind: wandb, project: x}]\n"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + text, encoding="utf-8")
    return file


# trackers of the file; key, part of the message, part of the suggestion.
MISTAKES = [
    ("[tensorbord]", "trackers.kind", "must be one of", "did you mean tensorboard?"),
    ("[tensorboard, {kind: wandb, projct: x}]", "trackers[1].projct", "unknown key", "did you mean trackers.project?"),
    ("[tensorboard, {kind: mlflow, project: x}]", "trackers[1].project", "kind: mlflow", "a setting of kind: wandb"),
    ("[{kind: wandb, mode: offlin}]", "trackers.mode", "must be one of", "did you mean offline?"),
    ("[{project: x}]", "trackers", "has no kind", "add `kind:` with one of tensorboard, wandb, mlflow"),
    ("{}", "trackers", "has no kind", "add `kind:`"),
    ("[wandb, {project: x}]", "trackers[1]", "has no kind", "add `kind:`"),
    ("[3]", "trackers", "must be a section with keys", "write `trackers:`"),
    ("[{kind: wandb, tags: [1]}]", "trackers.tags", "must be text", 'quote it: "1"'),
    ("[tensorboard, tensorboard]", "trackers", "listed twice", "remove one"),
]


@pytest.mark.parametrize(("text", "key", "message", "suggestion"), MISTAKES, ids=[row[0] for row in MISTAKES])
def test_each_mistake_is_named_with_its_place(
    tmp_path: Path, text: str, key: str, message: str, suggestion: str
) -> None:
    draft = draft_config(write(tmp_path, f"trackers: {text}\n"))
    (problem,) = draft.problems
    assert (problem.key, problem.where) == (key, f"{tmp_path / 'run.yaml'}:3")
    assert message in problem.message
    assert suggestion in problem.suggestion
    assert draft.config is not None
    # That a kind is there twice concerns a list that could be read.
    assert draft.usable("trackers") is ("twice" in message)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["tensorboard", "wandb"]),
        (["trackers=[mlflow]"], ["mlflow"]),
        (["trackers=mlflow"], ["mlflow"]),
        (["trackers=[mlflow, {kind: tensorboard}]"], ["mlflow", "tensorboard"]),
        (["trackers=null"], []),
        (["trackers=[]"], []),
        (["trackers=[]", "trackers.kind=wandb", "trackers.project=y"], ["wandb"]),
        (["trackers.0.kind=mlflow", "trackers.0.experiment=y"], ["mlflow", "wandb"]),
    ],
)
def test_options_set_the_list_or_an_entry(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    assert [entry.kind for entry in load_config(write(tmp_path, BOTH), options).trackers] == expected


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("trackers.wandb=1", "trackers.wandb"),
        ("trackers=[", "trackers"),
        ("trackers=[tensorboard, tensorbord]", "trackers[1].kind"),
    ],
)
def test_an_option_that_is_wrong_is_named(tmp_path: Path, option: str, key: str) -> None:
    (problem,) = draft_config(write(tmp_path, BOTH), [option]).problems
    assert (problem.key, problem.where) == (key, f"--set {option}")


def test_an_entry_may_stand_alone_and_its_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "trackers: {kind: wandb, dir: w}\n")
    monkeypatch.chdir(tmp_path.parent)
    (alone,) = load_config(file).trackers
    assert isinstance(alone, WandbTracker)
    assert alone.dir == tmp_path / "w"
    assert load_config(write(tmp_path, "trackers: tensorboard\n")).trackers == (TensorboardTracker(kind="tensorboard"),)
    assert load_config(write(tmp_path, "trackers:\n")).trackers == ()


@pytest.mark.parametrize("text", ["", BOTH, "trackers: [{kind: wandb, dir: w, tags: [a, b]}]\n"])
def test_a_resolved_file_loads_to_the_same_trackers(tmp_path: Path, text: str) -> None:
    config = load_config(write(tmp_path, text))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(config), encoding="utf-8")
    assert load_config(resolved) == config
    assert ("trackers: []" in resolved.read_text(encoding="utf-8")) is (text == "")
