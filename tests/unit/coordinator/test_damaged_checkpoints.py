"""Damaged checkpoints are put aside before a run resumes from an older one."""

from pathlib import Path

from coordinator.checkpoints.loading import set_damaged_aside
from tandem_files.checkpoints import mark_complete, mark_latest, newest_sound, step_folder


def test_latest_names_the_one_that_the_run_resumes_from(tmp_path: Path) -> None:
    for iteration in (4, 8):
        folder = step_folder(tmp_path, iteration)
        folder.mkdir(parents=True)
        (folder / "coordinator.json").write_text("{}")
        mark_complete(folder)
    mark_latest(tmp_path)
    (step_folder(tmp_path, 8) / "coordinator.json").write_text("[]")
    sound = newest_sound(tmp_path)
    assert sound is not None
    ((_, done),) = set_damaged_aside(sound)
    assert done == "; it is kept as damaged-step-00000008"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000004\n"
