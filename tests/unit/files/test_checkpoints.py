"""Checkpoint folders: what counts as complete, and what is removed."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from servicekit.errors import ConfigError
from tandem_files.atomic import write_bytes_atomic, write_json_atomic
from tandem_files.checkpoints import (
    COMPLETE,
    BestCheckpoint,
    DamagedCheckpoint,
    UndamagedCheckpoint,
    choose,
    list_complete,
    mark_best,
    mark_complete,
    mark_latest,
    newest_iteration,
    newest_sound,
    prune,
    read_best,
    read_complete,
    set_aside,
    step_folder,
    usable,
)
from tandem_files.digests import file_digest, write_manifest


def make(run_dir: Path, iteration: int, complete: bool = True) -> Path:
    folder = step_folder(run_dir, iteration)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "weights").write_text("w")
    if complete:
        mark_complete(folder, iteration=iteration)
    return folder


def best(iteration: int) -> BestCheckpoint:
    return BestCheckpoint(iteration=iteration, policy_version=iteration, metric="heldout/mean@1", value=0.5)


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for iteration in range(1, 6):
        make(tmp_path, iteration)
    assert mark_best(tmp_path, best(2))
    prune(tmp_path, keep=2)
    assert [iteration for iteration, _ in list_complete(tmp_path)] == [2, 4, 5]
    assert read_best(tmp_path) == best(2)
    assert mark_best(tmp_path, best(5))
    prune(tmp_path, keep=2)
    assert [iteration for iteration, _ in list_complete(tmp_path)] == [4, 5]


def test_only_a_complete_checkpoint_is_marked_as_the_best(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2, complete=False)
    assert not mark_best(tmp_path, best(2))
    assert read_best(tmp_path) is None
    assert mark_best(tmp_path, best(1))
    assert not mark_best(tmp_path, None)
    assert read_best(tmp_path) is None
    (tmp_path / "checkpoints" / "best.json").write_text('{"iteration": 1}')
    assert read_best(tmp_path) is None


def test_folders_sort_by_name_as_by_number(tmp_path: Path) -> None:
    assert step_folder(tmp_path, 12) == tmp_path / "checkpoints" / "step-00000012"
    with pytest.raises(ValueError, match="-1"):
        step_folder(tmp_path, -1)


def test_only_complete_checkpoints_count_oldest_first(tmp_path: Path) -> None:
    assert list_complete(tmp_path) == []
    folders = {iteration: make(tmp_path, iteration, complete=iteration != 20) for iteration in (20, 10, 123456789, 3)}
    (tmp_path / "checkpoints" / "step-x").mkdir()
    (tmp_path / "checkpoints" / "step-00000099").write_text("a file")
    assert list_complete(tmp_path) == [(3, folders[3]), (10, folders[10]), (123456789, folders[123456789])]


def test_the_mark_keeps_its_fields(tmp_path: Path) -> None:
    folder = make(tmp_path, 5)
    mark_complete(folder, iteration=5, policy_version=7)
    assert read_complete(folder) == {"iteration": 5, "policy_version": 7}
    assert sorted(path.name for path in folder.iterdir()) == [COMPLETE, "trainer"]


@pytest.mark.parametrize("content", [None, "{", "[]", '"x"', "\xff"])
def test_a_missing_or_damaged_mark_is_named(tmp_path: Path, content: str | None) -> None:
    folder = make(tmp_path, 5, complete=False)
    if content is not None:
        (folder / COMPLETE).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="step-00000005"):
        read_complete(folder)


def test_a_checkpoint_that_was_not_written_is_not_marked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step-00000001 does not exist"):
        mark_complete(step_folder(tmp_path, 1))


def test_pruning_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    for iteration, complete in ((1, True), (2, False), (3, True), (4, True), (5, False)):
        make(tmp_path, iteration, complete)
    removed = prune(tmp_path, keep=2)
    assert removed == [step_folder(tmp_path, 1), step_folder(tmp_path, 2)]
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4", "5"]
    assert prune(tmp_path, keep=2) == []


def test_pruning_keeps_at_least_one(tmp_path: Path) -> None:
    make(tmp_path, 1, complete=False)
    assert prune(tmp_path, keep=1) == []
    with pytest.raises(ValueError, match="at least 1, got 0"):
        prune(tmp_path, keep=0)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"iteration": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json_atomic(path, {"loss": float("nan")})
    with pytest.raises(TypeError):
        write_bytes_atomic(path, "text")  # type: ignore[arg-type]
    assert json.loads(path.read_text()) == {"iteration": 1}
    assert list(tmp_path.iterdir()) == [path]


def make_full(run_dir: Path, iteration: int) -> Path:
    """A checkpoint as trainer and coordinator leave it: shards under a manifest, everything else in complete.json."""
    folder = step_folder(run_dir, iteration)
    trainer = folder / "trainer"
    trainer.mkdir(parents=True)
    for name in ("meta.json", "shard-a", "shard-b"):
        (trainer / name).write_text(f"{name} of {iteration}")
    write_manifest(trainer, {path.name: file_digest(path) for path in trainer.iterdir()})
    (folder / "coordinator.json").write_text(f"state of {iteration}")
    mark_complete(folder, iteration=iteration)
    return folder


FILES = [
    "complete.json",
    "coordinator.json",
    "trainer/digests.json",
    "trainer/meta.json",
    "trainer/shard-a",
    "trainer/shard-b",
]


def newest(run_dir: Path) -> UndamagedCheckpoint:
    """The newest sound checkpoint of a folder that has one."""
    found = newest_sound(run_dir)
    assert found is not None
    return found


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [flip, cut, lambda path: path.unlink()], ids=["flipped", "truncated", "deleted"])
def test_a_damaged_newest_checkpoint_is_skipped_by_name(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    for iteration in (4, 8):
        make_full(tmp_path, iteration)
    assert newest(tmp_path).iteration == 8
    harm(step_folder(tmp_path, 8) / name)
    sound = newest(tmp_path)
    assert (sound.iteration, sound.folder) == (4, step_folder(tmp_path, 4))
    (complaint,) = sound.complaints()
    assert complaint.startswith("the checkpoint of iteration 8 ")
    assert complaint.endswith(": resuming from iteration 4")
    assert name in complaint
    if harm is cut and name != "complete.json":  # known without reading the file
        assert re.search(r"has \d+ bytes, \d+ were written", complaint)
    # small files are known to be damaged without reading shards
    found, over = usable(tmp_path)
    assert [iteration for iteration, _ in found] == ([8, 4] if "shard" in name or "meta" in name else [4])
    assert newest_iteration(tmp_path) == found[0][0]
    assert len(over) == 2 - len(found)


def test_latest_names_the_newest_complete_one_and_nothing_reads_it(tmp_path: Path) -> None:
    latest = tmp_path / "checkpoints" / "latest"
    for iteration in (4, 8):
        make_full(tmp_path, iteration)
        mark_latest(tmp_path)
    make(tmp_path, 12, complete=False)
    mark_latest(tmp_path)
    assert latest.read_text() == "step-00000008\n"
    latest.write_text("step-00000012\n")
    assert newest(tmp_path).iteration == newest_iteration(tmp_path) == 8
    assert choose(tmp_path, "last").iteration == 8
    assert [iteration for iteration, _ in usable(tmp_path)[0]] == [8, 4]
    assert prune(tmp_path, keep=1) == [step_folder(tmp_path, 4)]
    assert latest.is_file()
    (step_folder(tmp_path, 8) / COMPLETE).unlink()
    for _ in range(2):
        mark_latest(tmp_path)
        assert not latest.exists()


def test_latest_stays_where_its_writer_no_longer_leads(tmp_path: Path) -> None:
    def lost() -> None:
        raise PermissionError("another coordinator leads")

    make(tmp_path, 4)
    mark_latest(tmp_path)
    make(tmp_path, 8)
    with pytest.raises(PermissionError):
        mark_latest(tmp_path, lost)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_file()] == ["latest"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000004\n"


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    for iteration in (4, 8):
        flip(make_full(tmp_path, iteration) / "trainer" / "shard-b")
    with pytest.raises(DamagedCheckpoint) as caught:
        newest_sound(tmp_path)
    for part in ("iteration 8", "iteration 4", "shard-b has other bytes than were written", "start a new run"):
        assert part in str(caught.value)
    assert newest_iteration(tmp_path) == 8  # as far as small files tell


def test_a_damaged_checkpoint_is_set_aside_and_no_longer_pruned_for(tmp_path: Path) -> None:
    for iteration in (4, 8):
        make_full(tmp_path, iteration)
    flip(step_folder(tmp_path, 8) / "coordinator.json")
    (damage,) = newest(tmp_path).skipped
    aside = set_aside(damage)
    assert aside is not None
    assert aside.name == "damaged-step-00000008"
    make_full(tmp_path, 6)
    assert prune(tmp_path, keep=2) == []
    assert [iteration for iteration, _ in list_complete(tmp_path)] == [4, 6]
    assert set_aside(damage) is None


def test_the_last_or_a_numbered_checkpoint_is_chosen(tmp_path: Path) -> None:
    folders = {iteration: make(tmp_path, iteration) for iteration in (4, 8)}
    make(tmp_path, 12, complete=False)
    assert choose(tmp_path, "last").folder == folders[8]
    with pytest.raises(ConfigError, match=r"no best checkpoint .*evaluation\.best.*: give an iteration, here 4, 8"):
        choose(tmp_path, "best")
    (folders[8] / "coordinator.json").write_text('{"best": {"metric": "test/mean@1", "value": 0.25, "iteration": 0}}')
    with pytest.raises(
        ConfigError, match=r"before the training \(test/mean@1 0\.250\), the model in model\.path: give"
    ):
        choose(tmp_path, "best")
    (folders[8] / "coordinator.json").unlink()
    mark_best(tmp_path, best(4))
    assert choose(tmp_path, "best").folder == folders[4]
    assert choose(tmp_path, "4") == UndamagedCheckpoint(iteration=4, folder=folders[4], skipped=[])
    for which, says in {"12": "no checkpoint of iteration 12", "first": "no checkpoint 'first'", "-4": "'-4'"}.items():
        with pytest.raises(ConfigError, match=rf"{says}.*: give last, best or an iteration, here 4, 8"):
            choose(tmp_path, which)
    (folders[4] / "trainer" / "weights").write_text("x")
    with pytest.raises(DamagedCheckpoint, match=r"iteration 4 is damaged \(.*weights has other bytes"):
        choose(tmp_path, "4")


@pytest.mark.parametrize("which", ["last", "4"])
def test_no_checkpoint_can_be_chosen_where_there_is_none(tmp_path: Path, which: str) -> None:
    with pytest.raises(ConfigError, match=r"has no (complete checkpoint yet|checkpoint of iteration 4.*none yet)"):
        choose(tmp_path, which)
