"""What cannot be removed: all the rest goes, it is told by name, and goes first once it can."""

from pathlib import Path

import pytest

from tandem_files.atomic import NotRemoved, make_way, remove_each, replace_folder
from tandem_files.checkpoints import (
    Damage,
    inspect,
    list_all,
    list_complete,
    mark_complete,
    prune,
    set_aside,
    step_folder,
    usable,
)
from tandem_files.exports import MARK, export_folder, list_exports, prune_exports
from tests.kit.folders import held

BUSY = "Device or resource busy"


def save(run_dir: Path, iteration: int) -> Path:
    folder = step_folder(run_dir, iteration)
    (folder / "trainer").mkdir(parents=True)
    for name in ("a", "b"):
        (folder / "trainer" / name).write_bytes(bytes(100))
    mark_complete(folder, iteration=iteration)
    return folder


def numbers(run_dir: Path) -> list[int]:
    return [iteration for iteration, _ in list_all(run_dir)]


def test_everything_else_is_removed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("target", "one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "file").touch()
    paths = [tmp_path / name for name in ("one", "file", "link", "two", "missing")]
    stuck = tmp_path / "one" / "deep" / "file-1"
    stuck.touch()
    with held(stuck):
        assert remove_each(paths) == [f"{stuck}: {BUSY}"]
        assert {path.name for path in tmp_path.rglob("*")} == {"one", "target", "deep", "file-1", "file"}
        assert not (tmp_path / "one" / "deep" / "file").exists()
    assert remove_each(paths) == []
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_of_many_checkpoints_the_stuck_ones_alone_are_left_and_count_as_none(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    stuck = [step_folder(tmp_path, iteration) / "trainer" / "b" for iteration in (1, 3)]
    with held(*stuck):
        for iteration in range(4, 11):
            save(tmp_path, iteration)
            try:
                prune(tmp_path, 2)
            except NotRemoved as error:
                told = error.left
        assert numbers(tmp_path) == [1, 3, 9, 10]
        assert [iteration for iteration, _ in list_complete(tmp_path)] == [9, 10]
        assert [iteration for iteration, _ in usable(tmp_path)[0]] == [10, 9]
        assert told == [f"{path}: {BUSY}" for path in stuck]
        assert not (step_folder(tmp_path, 1) / "trainer" / "a").exists()  # its bytes are free
    save(tmp_path, 11)
    prune(tmp_path, 2)
    assert numbers(tmp_path) == [10, 11]


def test_a_checkpoint_whose_mark_cannot_be_removed_stays_whole(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    mark = step_folder(tmp_path, 1) / "complete.json"
    with held(mark), pytest.raises(NotRemoved, match=f"{mark}: {BUSY}"):
        prune(tmp_path, 1)
    assert numbers(tmp_path) == [1, 3]
    assert (step_folder(tmp_path, 1) / "trainer" / "a").exists()


def test_a_checkpoint_that_was_moved_elsewhere_stays_whole_there(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    elsewhere = step_folder(tmp_path, 1).rename(tmp_path / "elsewhere")
    step_folder(tmp_path, 1).symlink_to(elsewhere)
    prune(tmp_path, 1)
    assert numbers(tmp_path) == [3]
    assert (elsewhere / "complete.json").is_file()


def export(run_dir: Path, name: str) -> Path:
    folder = run_dir / "exports" / name
    folder.mkdir(parents=True)
    for file in (MARK, "model.safetensors"):
        (folder / file).touch()
    return folder


def test_a_stuck_export_or_half_of_one_does_not_keep_the_others(tmp_path: Path) -> None:
    names = [export_folder(tmp_path, number).name for number in (5, 10, 15, 20)]
    for name in (*names, ".iteration-000007.partial", ".iteration-000008.partial"):
        export(tmp_path, name)
    stuck = [tmp_path / "exports" / name / "model.safetensors" for name in (".iteration-000007.partial", names[0])]
    with held(*stuck):
        with pytest.raises(NotRemoved) as caught:
            prune_exports(tmp_path, newest=20, keep=2)
        aside = tmp_path / "exports" / f".{names[0]}.old"
        assert caught.value.left == [f"{stuck[0]}: {BUSY}", f"{aside}/model.safetensors: {BUSY}"]
        assert [number for number, _ in list_exports(tmp_path)] == [15, 20]
        with pytest.raises(NotRemoved):
            prune_exports(tmp_path, newest=20, keep=1)
        assert [number for number, _ in list_exports(tmp_path)] == [20]
    prune_exports(tmp_path, newest=20, keep=1)
    assert [path.name for path in (tmp_path / "exports").iterdir()] == [names[3]]


def test_what_is_in_the_way_is_renamed_and_goes_with_the_old_ones(tmp_path: Path) -> None:
    """As a checkpoint that a crash has left under the number of the next one, and that another program holds."""
    folder = save(tmp_path, 4)
    with held(folder / "trainer" / "a"):
        make_way(folder)
        assert numbers(tmp_path) == []
        save(tmp_path, 4)
        save(tmp_path, 5)
        with pytest.raises(NotRemoved, match=rf"\.step-00000004\.left-[0-9a-f]{{32}}/trainer/a: {BUSY}"):
            prune(tmp_path, 1)
    prune(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_what_can_be_neither_removed_nor_renamed_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    with held(folder), pytest.raises(OSError, match=f"{BUSY}: '{folder}'"):
        make_way(folder)


def test_an_old_copy_that_is_stuck_does_not_keep_a_folder_from_being_replaced(tmp_path: Path) -> None:
    for name in ("out", ".out.old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with held(tmp_path / ".out.old" / ".out.old"):
        replace_folder(tmp_path / "new", tmp_path / "out")
    assert (tmp_path / "out" / "new").exists()


def test_a_damaged_checkpoint_is_set_aside_beside_a_stuck_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    (folder / "complete.json").write_text("{")
    stuck = folder.with_name(f"damaged-{folder.name}")
    stuck.mkdir()
    (stuck / "held").touch()
    with held(stuck / "held"):
        assert set_aside(Damage(iteration=4, folder=folder, what=inspect(folder, deep=False))) == stuck
    assert (stuck / "trainer").exists()
