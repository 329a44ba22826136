"""Checkpoint folders: what counts as complete, and what is removed."""

import json

import pytest

from servicekit.checkpoints import COMPLETE, list_complete, mark_complete, prune, read_complete, step_folder
from servicekit.errors import ConfigError
from servicekit.files import write_bytes_atomic, write_json_atomic


def make(run_dir, iteration, complete=True):
    folder = step_folder(run_dir, iteration)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "weights").write_text("w")
    if complete:
        mark_complete(folder, iteration=iteration)
    return folder


def test_folders_sort_by_name_as_by_number(tmp_path):
    assert step_folder(tmp_path, 12) == tmp_path / "checkpoints" / "step-00000012"
    with pytest.raises(ValueError, match="-1"):
        step_folder(tmp_path, -1)


def test_only_complete_checkpoints_count_oldest_first(tmp_path):
    assert list_complete(tmp_path) == []
    folders = {iteration: make(tmp_path, iteration, complete=iteration != 20) for iteration in (20, 10, 123456789, 3)}
    (tmp_path / "checkpoints" / "step-x").mkdir()
    (tmp_path / "checkpoints" / "step-00000099").write_text("a file")
    assert list_complete(tmp_path) == [(3, folders[3]), (10, folders[10]), (123456789, folders[123456789])]


def test_the_mark_keeps_its_fields(tmp_path):
    folder = make(tmp_path, 5)
    mark_complete(folder, iteration=5, policy_version=7)
    assert read_complete(folder) == {"iteration": 5, "policy_version": 7}
    assert sorted(path.name for path in folder.iterdir()) == [COMPLETE, "trainer"]


@pytest.mark.parametrize("content", [None, "{", "[]", '"x"', "\xff"])
def test_a_missing_or_damaged_mark_is_named(tmp_path, content):
    folder = make(tmp_path, 5, complete=False)
    if content is not None:
        (folder / COMPLETE).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="step-00000005"):
        read_complete(folder)


def test_a_checkpoint_that_was_not_written_is_not_marked(tmp_path):
    with pytest.raises(ValueError, match="step-00000001 does not exist"):
        mark_complete(step_folder(tmp_path, 1))


def test_pruning_keeps_the_newest_and_what_is_being_written(tmp_path):
    for iteration, complete in ((1, True), (2, False), (3, True), (4, True), (5, False)):
        make(tmp_path, iteration, complete)
    removed = prune(tmp_path, keep=2)
    assert removed == [step_folder(tmp_path, 1), step_folder(tmp_path, 2)]
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4", "5"]
    assert prune(tmp_path, keep=2) == []


def test_pruning_keeps_at_least_one(tmp_path):
    make(tmp_path, 1, complete=False)
    assert prune(tmp_path, keep=1) == []
    with pytest.raises(ValueError, match="at least 1, got 0"):
        prune(tmp_path, keep=0)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "state.json"
    write_json_atomic(path, {"iteration": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json_atomic(path, {"loss": float("nan")})
    with pytest.raises(TypeError):
        write_bytes_atomic(path, "text")  # type: ignore[arg-type]
    assert json.loads(path.read_text()) == {"iteration": 1}
    assert list(tmp_path.iterdir()) == [path]
