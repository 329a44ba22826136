"""Requests name folders of the run, and replace nothing that is not ours."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from servicekit.errors import InvalidRequest
from tandem_files.run_paths import FolderKind, inside, replaceable

KIND = FolderKind(name="a checkpoint", mark="meta.json", entry=re.compile(r"[\w.-]+\.(json|safetensors)"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_folders_below_the_run_may_be_named_by_any_spelling(run: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(run)
    assert inside(f"{run}/a/../b", run, "path") == run / "b"
    assert inside(str(tmp_path / "alias" / "a"), run, "path") == run / "a"
    assert inside(str(run / "a"), tmp_path / "alias", "path") == run / "a"
    assert inside(str(run), run, "disk_folder", or_itself=True) == run


@pytest.mark.parametrize(
    "path", ["", "a", "/", "{run}", "{run}/..", "{run}/../x", "{run}-2/x", "{run}/out/x", "{run}/\0", "{run}/loop/x"]
)
def test_anything_else_is_refused(run: Path, tmp_path: Path, path: str) -> None:
    (run / "out").symlink_to(tmp_path)
    (run / "loop").symlink_to(run / "loop")
    with pytest.raises(InvalidRequest, match=r"^path "):
        inside(path.format(run=run), run, "path")


def test_our_own_folder_is_replaced(run: Path) -> None:
    (run / "c").mkdir()
    assert replaceable(str(run / "c"), run, "path", KIND) == run / "c"  # an empty one
    for name in ("meta.json", "shard-tp00-pp00.safetensors"):
        (run / "c" / name).touch()
    assert replaceable(str(run / "c"), run, "path", KIND) == run / "c"


@pytest.mark.parametrize("entry", ["thesis.txt", "sub/", "link.json"])
def test_a_folder_that_holds_anything_else_is_not(run: Path, entry: str) -> None:
    folder = run / "c"
    folder.mkdir()
    (folder / "meta.json").touch()
    if entry.endswith("/"):
        (folder / entry).mkdir()
    elif entry.startswith("link"):
        (folder / entry).symlink_to("/etc/hostname")
    else:
        (folder / entry).touch()
    with pytest.raises(InvalidRequest, match="something else than a checkpoint"):
        replaceable(str(folder), run, "path", KIND)


def test_nor_is_one_without_our_mark(run: Path) -> None:
    (run / "c").mkdir()
    (run / "c" / "other.json").touch()
    with pytest.raises(InvalidRequest, match="something else"):
        replaceable(str(run / "c"), run, "path", KIND)


@pytest.mark.parametrize(
    ("entries", "ours"),
    [
        (["inner/a.json"], True),
        (["inner/thesis.txt"], False),
        (["inner/deep/a.json"], False),
        (["other/a.json"], False),
        (["inner"], False),
    ],
)
def test_a_kind_may_have_folders_of_such_files(tmp_path: Path, entries: list[str], ours: bool) -> None:
    folder = tmp_path / "c"
    for entry in ["meta.json", *entries]:
        (folder / entry).parent.mkdir(parents=True, exist_ok=True)
        (folder / entry).touch()
    assert replace(KIND, folders=frozenset({"inner"})).is_in(folder) is ours


def test_a_link_to_a_folder_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "meta.json").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.json").touch()
    (tmp_path / "c" / "inner").symlink_to(tmp_path / "other")
    assert not replace(KIND, folders=frozenset({"inner"})).is_in(tmp_path / "c")
