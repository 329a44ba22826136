"""A run's folder belongs to one run: made and claimed by all of its processes at once, refused to others by name."""

import json
import threading
from pathlib import Path

import pytest

from servicekit.errors import ConfigError
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.run_folder import RUN_FILE, RunIdentity, claim_run_dir, note_launch, read_identity


def test_a_folder_is_made_and_belongs_to_its_run_over_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    assert claim_run_dir(folder, "first") == claim_run_dir(folder, "first") == RunIdentity(run_id="first")
    assert [path.name for path in folder.iterdir()] == [RUN_FILE]


def test_another_run_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    claim_run_dir(folder, "first")
    before = (folder / RUN_FILE).read_bytes()
    with pytest.raises(ConfigError) as caught:
        claim_run_dir(folder, "second")
    assert str(caught.value) == (
        f"{folder} is the folder of run 'first' (run.json), and this is run 'second' (TANDEM_RUN_ID): give this run a "
        "folder of its own (TANDEM_RUN_DIR), or resume the other one by its id"
    )
    assert (folder / RUN_FILE).read_bytes() == before


def test_of_many_that_claim_at_once_one_run_gets_the_folder(tmp_path: Path) -> None:
    for attempt in range(20):
        folder, start = tmp_path / str(attempt), threading.Barrier(8)
        results: list[str] = []

        def claim(run_id: str, folder: Path = folder, start: threading.Barrier = start) -> None:
            start.wait(10)
            try:
                results.append(claim_run_dir(folder, run_id).run_id)  # noqa: B023 - joined below
            except ConfigError:
                results.append("refused")  # noqa: B023 - joined below

        threads = [threading.Thread(target=claim, args=(f"run-{number % 2}",)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        owner = read_identity(folder)
        assert owner is not None
        assert sorted(results) == ["refused"] * 4 + [owner.run_id] * 4
        assert [path.name for path in folder.iterdir()] == [RUN_FILE]


def test_a_volume_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TANDEM_RUN_DIR='.*/mount/first' is wrong: .* is its volume mounted\?"):
        claim_run_dir(tmp_path / "mount" / "first", "first")
    assert not (tmp_path / "mount").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="TANDEM_RUN_DIR"):
        claim_run_dir(tmp_path / "file", "first")


@pytest.mark.parametrize("content", ["", "{}", '{"run_id": 3}', "[]", '{"run_id": "a", "color": "red"}'])
def test_a_damaged_note_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"run\.json does not say whose folder it is"):
        claim_run_dir(tmp_path, "first")


def test_a_launch_is_let_in_under_its_own_name_and_the_run_keeps_its_id(tmp_path: Path) -> None:
    assert note_launch(tmp_path, "a-1").run_id == "a-1"
    note_launch(tmp_path, "a-2")
    claimed = claim_run_dir(tmp_path, "a-2")
    assert (claimed.run_id, claimed.is_launched) == ("a-1", True)
    with pytest.raises(ConfigError, match="is the folder of run 'a-1'"):
        claim_run_dir(tmp_path, "a-3")


def test_a_restored_folder_belongs_to_the_run_of_its_checkpoints(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 4)
    folder.mkdir(parents=True)
    mark_complete(folder, run_id="first")
    with pytest.raises(ConfigError, match="is the folder of run 'first'"):
        claim_run_dir(tmp_path, "second")
    assert json.loads((tmp_path / RUN_FILE).read_text())["run_id"] == "first"
    (tmp_path / RUN_FILE).unlink()
    assert note_launch(tmp_path, "a-1").run_id == "first"
