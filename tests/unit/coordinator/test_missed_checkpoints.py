"""A checkpoint that cannot be written leaves the one before as it was; the run ends after too many in a row."""

import asyncio
import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from coordinator.checkpoints.run_checkpoints import MissedCheckpoints
from coordinator.checkpoints.writing import Checkpointer
from coordinator.record.progress import Progress
from coordinator.record.state import NotWritten, RunState
from coordinator.watch.events import EventLog
from servicekit.errors import Internal, TandemError, Unavailable
from tandem_files.atomic import SPARE_BYTES, check_room
from tandem_files.checkpoints import list_all, newest_sound, step_folder
from tests.kit.folders import fill, held, small_disk
from tests.unit.coordinator.test_state import state_at


class FakeTrainerClient:
    """Writes a file; fails with what it was told."""

    def __init__(self) -> None:
        self.fault: TandemError | None = None
        self.lost = False
        self.written = asyncio.Event()

    async def save_checkpoint(self, folder: Path, *, background: bool) -> bool:
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(1000))
        if self.fault is not None and not background:
            raise self.fault
        return background

    async def finish_checkpoint(self, folder: Path) -> None:
        await self.written.wait()
        if self.fault is not None:
            raise self.fault

    async def status(self) -> None:
        if self.lost:
            raise Unavailable("trainer: it is gone")


def make(run_dir: Path, *, background: bool = False) -> tuple[FakeTrainerClient, Checkpointer]:
    client: Any = FakeTrainerClient()
    mark = {"run_id": "r"}
    checkpointer = Checkpointer(
        run_dir=run_dir, model="models/a", trainer=client, keep=2, background=background, mark=mark
    )
    return client, checkpointer


async def lead() -> None:
    pass


async def write(checkpointer: Checkpointer, iteration: int) -> None:
    await checkpointer.save_trainer(iteration)
    await checkpointer.complete(state_at(iteration), lead)
    await checkpointer.settle()


def newest(run_dir: Path) -> int:
    sound = newest_sound(run_dir)
    return 0 if sound is None else sound.iteration


async def test_a_failed_write_leaves_nothing_behind_and_the_one_before(tmp_path: Path) -> None:
    client, checkpointer = make(tmp_path)
    await write(checkpointer, 2)
    client.fault = Internal("trainer: cannot write checkpoint: No space left on device")
    with pytest.raises(NotWritten, match="No space left on device"):
        await write(checkpointer, 4)
    assert [iteration for iteration, _ in list_all(tmp_path)] == [2]
    client.fault = None
    await write(checkpointer, 6)
    assert newest(tmp_path) == 6


async def test_a_lost_trainer_is_what_has_failed(tmp_path: Path) -> None:
    client, checkpointer = make(tmp_path)
    client.fault, client.lost = Internal("the trainer failed"), True
    with pytest.raises(Unavailable, match="it is gone"):
        await checkpointer.save_trainer(2)


async def test_no_room_for_the_coordinators_own_files_is_a_miss_too(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as disk:
        _, checkpointer = make(disk)
        await write(checkpointer, 2)
        await checkpointer.save_trainer(4)
        fill(disk)
        with pytest.raises(NotWritten, match=r"cannot write .*coordinator\.json: No space left on device"):
            await checkpointer.complete(state_at(4), lead)
        assert [iteration for iteration, _ in list_all(disk)] == [2]
        assert newest(disk) == 2


async def test_old_ones_that_cannot_be_removed_are_told_once_and_do_not_keep_the_others(tmp_path: Path) -> None:
    client: Any = FakeTrainerClient()
    state, events = state_at(2), EventLog()
    progress = Progress(state=state, events=events, limits={})
    left = partial(progress.note_left, "checkpoints")
    checkpointer = Checkpointer(
        run_dir=tmp_path, model="m", trainer=client, keep=2, background=False, mark={"run_id": "r"}, left=left
    )
    await write(checkpointer, 2)
    stuck = step_folder(tmp_path, 2) / "trainer" / "weights"
    with held(stuck):
        for iteration in range(4, 16, 2):
            await write(checkpointer, iteration)
        assert [iteration for iteration, _ in list_all(tmp_path)] == [2, 12, 14]
        assert state.totals.warnings == 1
        (text,) = state.troubles
        assert text.startswith(f"Old checkpoints cannot be removed, and fill the disk ({stuck}: Device or resource")
        assert state.not_removed == [text]
    await write(checkpointer, 16)
    assert [iteration for iteration, _ in list_all(tmp_path)] == [14, 16]
    assert (state.troubles, state.not_removed, state.totals.warnings) == ([], [], 1)


async def test_what_a_crash_left_under_the_number_of_a_checkpoint_is_not_in_its_way(tmp_path: Path) -> None:
    _, checkpointer = make(tmp_path)
    left = step_folder(tmp_path, 4) / "trainer" / "weights"
    left.parent.mkdir(parents=True)
    left.touch()
    with held(left):
        await write(checkpointer, 4)
        assert newest(tmp_path) == 4
    await write(checkpointer, 6)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()) == [
        "step-00000004",
        "step-00000006",
    ]


async def test_one_that_is_written_beside_the_training_counts_when_it_is_complete(tmp_path: Path) -> None:
    client, checkpointer = make(tmp_path, background=True)
    client.written.set()
    await write(checkpointer, 2)
    client.written.clear()
    state = state_at(4)
    await checkpointer.save_trainer(4)
    await checkpointer.complete(state, lead)
    state.iteration = 5  # the run continues
    assert (newest(tmp_path), checkpointer.newest, checkpointer.has_ended) == (2, 4, False)
    client.written.set()
    await checkpointer.settle()
    assert newest(tmp_path) == 4
    assert RunState.load(tmp_path / "checkpoints" / "step-00000004" / "coordinator.json").iteration == 4


async def test_one_that_fails_beside_the_training_is_a_miss_and_the_one_before_stays(tmp_path: Path) -> None:
    client, checkpointer = make(tmp_path, background=True)
    client.written.set()
    await write(checkpointer, 2)
    client.fault = Internal("trainer: cannot write checkpoint: No space left on device")
    with pytest.raises(NotWritten, match="No space left on device"):
        await write(checkpointer, 4)
    assert ([iteration for iteration, _ in list_all(tmp_path)], checkpointer.newest) == ([2], -1)
    await checkpointer.settle()  # there is nothing left to wait for


def test_misses_are_warned_of_until_there_are_too_many(tmp_path: Path) -> None:
    state, events = state_at(6), EventLog()
    missed = MissedCheckpoints(state=state, progress=Progress(state=state, events=events, limits={}), budget=2)
    full = NotWritten("the disk is full")

    def alarm() -> float | None:
        return REGISTRY.get_sample_value("tandem_missed_checkpoints")

    missed.note(2, full)
    missed.none()
    assert (alarm(), state.missed_checkpoints) == (0, [])
    for iteration in (4, 6):
        missed.note(iteration, full)
    assert (alarm(), state.totals.warnings) == (2, 3)
    assert state.missed_checkpoints[-1] == "The checkpoint of iteration 6 was not written: the disk is full."
    with pytest.raises(NotWritten, match=r"3 checkpoints in a row .*budget is 2; .*iteration 8: the disk is full"):
        missed.note(8, full)


def test_room_is_looked_for_with_some_to_spare(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", f"{SPARE_BYTES + (2 << 20)}") as disk:
        check_room(disk / "step" / "trainer", 1 << 20)
        with pytest.raises(OSError, match="No space left on device: 19 MiB are needed, 18 MiB are free") as caught:
            check_room(disk / "step" / "trainer", 3 << 20)
    assert caught.value.errno == errno.ENOSPC
