"""The files of a ledger: what is kept for how long, and what nothing needs any more."""

import errno
import os
from pathlib import Path

import pytest

from coordinator.ledger.files import LedgerFiles
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.ledger.records import FOLDER, groups_files, segment, segments, step_files


@pytest.mark.parametrize("steps", range(6))
def test_a_process_that_is_killed_while_it_tidies_leaves_no_gap(tmp_path: Path, steps: int) -> None:
    (tmp_path / FOLDER).mkdir()
    for number in range(1, 6):
        segment(tmp_path, number).touch()
    left = steps

    def killed() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    files, boundaries = LedgerFiles(tmp_path, 1, killed), {4: 0, 5: 9}
    try:
        files.tidy(1, boundaries, {}, 0)
    except KeyboardInterrupt:
        assert steps < 3
    assert list(segments(tmp_path)) == list(range(1 + min(steps, 3), 6))


def test_steps_beyond_the_budget_are_given_up_until_there_is_a_checkpoint_after_them(tmp_path: Path) -> None:
    files = LedgerFiles(tmp_path, 1, lambda: None)
    half = bytes(1 << 19)
    files.keep_step(1, [half])
    assert list(step_files(tmp_path)) == [1]
    files.keep_step(2, [half, half])
    assert list(step_files(tmp_path)) == [], "what is left of the line is of no use"
    (remark,) = files.remarks
    assert "the loss of the trainer would cost the iterations since the checkpoint" in remark
    assert "run.ledger_max_mib (1 MiB)" in remark
    files.keep_step(3, [b"small"])
    assert list(step_files(tmp_path)) == []
    files.tidy(1, {}, {}, 0)
    files.keep_step(4, [b"small"])
    assert list(step_files(tmp_path)) == []
    complete(tmp_path, 4)
    files.tidy(1, {}, {}, 0)
    files.keep_step(5, [b"small"])
    assert list(step_files(tmp_path)) == [5]


def test_a_disk_that_has_room_again_wants_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, real = LedgerFiles(tmp_path, 1, lambda: None), os.write
    files.keep_step(1, [b"step"])

    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.write", full)
    for iteration in (2, 3):
        files.keep_step(iteration, [b"step"])
    (remark,) = files.remarks
    assert "not kept" in remark
    assert not files.wants_checkpoint
    monkeypatch.setattr("os.write", real)
    files.keep_step(4, [b"step"])
    assert files.wants_checkpoint
    # It is being written, or is missed: the regular ones are enough.
    files.wants_checkpoint = False
    files.keep_step(5, [b"step"])
    assert not files.wants_checkpoint
    complete(tmp_path, 4)
    files.tidy(1, {}, {}, 0)
    files.keep_step(6, [b"step"])
    assert max(step_files(tmp_path)) == 6


@pytest.mark.parametrize("by", ["groups", "sync"])
def test_finished_groups_that_found_no_room_are_written_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    files, real = LedgerFiles(tmp_path, 1, lambda: None), os.write
    for wave in (1, 2):
        files.begin_groups(wave, keep=False)
        files.append_groups(wave, b"%d before " % wave)
    files.write()

    def full(descriptor: int, content: bytes) -> int:
        if len(content) > 3:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, content[:3])  # some of it finds room

    monkeypatch.setattr("os.write", full)
    for _ in range(2):
        files.append_groups(1, b"1 meanwhile ")
        files.write()
    assert [path.stat().st_size for path in groups_files(tmp_path).values()] == [0, len(b"2 before ")]
    (remark,) = files.remarks
    assert remark.startswith("until there is room, a crash would cost the finished groups of this iteration")
    files.tidy(2, {}, {0: 1}, 0)  # a resume from the beginning would need it
    monkeypatch.setattr("os.write", real)
    if by == "groups":
        files.append_groups(2, b"2 after ")
        files.write()
    else:
        files.sync()
    found = [path.read_bytes() for path in groups_files(tmp_path).values()]
    assert found == [b"1 before 1 meanwhile 1 meanwhile ", b"2 before " + b"2 after " * (by == "groups")]
    files.append_groups(1, bytes(1 << 20))
    assert "they are not kept: they take more than run.ledger_max_mib (1 MiB)" in files.remarks[1]
    assert groups_files(tmp_path)[1].stat().st_size == 0


def test_steps_are_kept_until_a_checkpoint_after_them_is_complete(tmp_path: Path) -> None:
    files = LedgerFiles(tmp_path, 1, lambda: None)
    for iteration in range(1, 6):
        files.keep_step(iteration, [b"step"])
    files.tidy(6, {}, {}, 0)
    assert list(step_files(tmp_path)) == [1, 2, 3, 4, 5]
    complete(tmp_path, 3)
    files.tidy(6, {}, {}, 0)
    assert list(step_files(tmp_path)) == [4, 5]
    # Another process counts what is there.
    again = LedgerFiles(tmp_path, 1, lambda: None)
    again.keep_step(6, [bytes(1 << 20)])
    assert list(step_files(tmp_path)) == []


def test_a_log_that_an_old_checkpoint_keeps_is_named_when_it_is_large(tmp_path: Path) -> None:
    """Whether one is the best, or none has been written for long."""
    (tmp_path / FOLDER).mkdir()
    files, half = LedgerFiles(tmp_path, 1, lambda: None), bytes(1 << 19)
    complete(tmp_path, 2)
    for number in range(1, 6):
        segment(tmp_path, number).write_bytes(half)
        files.tidy(9, {one: 2 * one for one in range(1, number + 1)}, {}, 0)
        assert len(files.remarks) == (number >= 4), "the newest one is not sealed"
    (remark,) = files.remarks
    assert remark == (
        "the log since iteration 2, that of the oldest checkpoint, has 1 MiB, more than run.ledger_max_mib (1): remove "
        "that checkpoint if you do not need it"
    )
    files.tidy(9, {1: 2}, {}, 0)
    assert len(files.remarks) == 1
    assert len(segments(tmp_path)) == 5


def complete(run_dir: Path, iteration: int) -> None:
    folder = step_folder(run_dir, iteration)
    folder.mkdir(parents=True)
    mark_complete(folder, iteration=iteration, policy_version=iteration, model="m", model_fingerprint="f")
