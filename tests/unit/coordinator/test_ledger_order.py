"""The order of records and of waves: a slow disk moves no record, and what is settled does not begin anew."""

import asyncio
import os
import threading
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.data.cursor import CursorState, SourcePosition
from coordinator.ledger.files import LedgerFiles
from coordinator.ledger.ledger import Ledger
from coordinator.ledger.redo import way_back
from coordinator.record.state import RunState
from tandem_clients.flow import Completion, Group, Order, Prompt, Sampling, TrainBatch
from tandem_files.atomic import no_check
from tandem_files.checkpoints import mark_complete, step_folder
from tandem_files.ledger.reading import read_ledger
from tandem_files.ledger.records import segment, segments

PROMPT = Prompt(row=0, token_ids=array("I", [5]), answer="")
PROMPTS = {f"i1.g{row}.row{row}": PROMPT for row in range(3)}
ORDER = Order(
    policy_version=0,
    num_completions=1,
    sampling=Sampling(temperature=1.0, max_new_tokens=4, stop_token_ids=()),
    seed=None,
)


def group(name: str) -> Group:
    completion = Completion(
        token_ids=array("I", [7]),
        logprobs=array("f", [-1.0]),
        truncated=False,
        oldest_version=0,
        version_spans=((1, 0),),
        loss_mask=None,
    )
    return Group(group_id=name, prompt=PROMPT, completions=(completion,))


class SlowDisk:
    """Lets writes wait, once it is asked to."""

    def __init__(self) -> None:
        self.writes = threading.Event()
        self.writes.set()
        self.waits = threading.Event()

    def check(self) -> None:
        if not self.writes.is_set():
            self.waits.set()
        assert self.writes.wait(30.0)


def state_after(iteration: int, digest: str = "", *, waves: int = 0, taken: int = 0) -> RunState:
    cursor = CursorState(sources=(SourcePosition(epoch=0, position=taken, num_prompts=10**6),), waves=waves)
    made = RunState(cursor=cursor, batch_rng={}, model_fingerprint="", iteration=iteration, steps_digest=digest)
    made.policy_version = iteration
    return made


def ledger_of(run_dir: Path, check: Callable[[], None] = no_check, *, redoes: bool = False) -> Ledger:
    return Ledger(
        run_dir=run_dir,
        run_id="mine",
        found=read_ledger(run_dir),
        max_mib=1,
        model="",
        max_staleness=3,
        waves_ahead=3,
        redoes=redoes,
        check=check,
        warn=pytest.fail,
    )


async def begun(run_dir: Path, check: Callable[[], None]) -> tuple[Ledger, RunState]:
    ledger, state = ledger_of(run_dir, check), state_after(0)
    await ledger.open(state, saved=0)
    await ledger.begin(1, PROMPTS, ORDER, 0)
    return ledger, state


async def test_what_happens_while_a_segment_begins_is_in_that_segment(tmp_path: Path) -> None:
    disk = SlowDisk()
    ledger, state = await begun(tmp_path, disk.check)
    first, second, third = PROMPTS
    ledger.finished(1, group(first))
    await ledger.checkpoint(state)
    disk.writes.clear()
    ledger.finished(1, group(second))
    await asyncio.to_thread(disk.waits.wait, 30.0)
    beginning = asyncio.create_task(ledger.begin(2, {}, ORDER, 3))  # after a checkpoint, in a segment of its own
    await asyncio.sleep(0)
    ledger.finished(1, group(third))
    disk.writes.set()
    await beginning
    await ledger.close()
    assert list(segments(tmp_path)) == [1, 2]
    whole = read_ledger(tmp_path)
    segment(tmp_path, 1).unlink()  # what nothing needs any more
    assert read_ledger(tmp_path).account.open_groups(1) == whole.account.open_groups(1) == dict.fromkeys(PROMPTS, True)


async def test_groups_that_finish_in_a_swarm_are_written_together_and_before_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write, written = SlowDisk(), os.write, list[tuple[str, bytes]]()

    def noted(descriptor: int, content: bytes) -> int:
        written.append((Path(f"/proc/self/fd/{descriptor}").readlink().suffix, bytes(content)))
        return write(descriptor, content)

    ledger, _ = await begun(tmp_path, disk.check)
    await ledger.written()
    monkeypatch.setattr("os.write", noted)
    first, *others = PROMPTS
    disk.writes.clear()
    ledger.finished(1, group(first))
    await asyncio.to_thread(disk.waits.wait, 30.0)
    for name in others:
        ledger.finished(1, group(name))
    disk.writes.set()
    await ledger.written()
    assert [suffix for suffix, _ in written][-2:] == [".groups", ".log"]
    assert len(written) <= 4, "two for the group that the disk was slow with, two for all others"
    for name in PROMPTS:
        having = [place for place, (_, content) in enumerate(written) if name.encode() in content]
        assert [written[place][0] for place in having] == [".groups", ".log"]
    await ledger.close()


async def test_a_step_is_kept_before_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that was killed in between left a gap; a trainer lost after that cost all since the checkpoint."""
    keep, begun_to, may = LedgerFiles.keep_step, threading.Event(), threading.Event()

    def slowly(*given: Any) -> None:
        begun_to.set()
        assert may.wait(30.0)
        keep(*given)

    monkeypatch.setattr(LedgerFiles, "keep_step", slowly)
    ledger = ledger_of(tmp_path, redoes=True)
    await ledger.open(state_after(0), saved=0)
    await ledger.begin(1, wave(1), ORDER, 0)
    sending = asyncio.create_task(trained(ledger, 1, *wave(1)))
    assert await asyncio.to_thread(begun_to.wait, 30.0)
    await asyncio.sleep(0)
    assert not sending.done()
    may.set()
    await sending
    way = way_back(tmp_path, None, 1, "i1")
    assert way is not None
    assert [step.step_id for step in way.steps] == ["i1"]
    await ledger.close()


def wave(number: int) -> dict[str, Prompt]:
    """A wave of one prompt."""
    return {f"i{number}.g0.row{number}": PROMPT}


async def trained(ledger: Ledger, iteration: int, name: str) -> None:
    ledger.finished(ledger._account.wave_of(name), group(name))
    ledger._trained = {name: None}
    await ledger.step(iteration, TrainBatch(step_id=f"i{iteration}", policy_version=iteration - 1, updates=()))


async def checkpoint(run_dir: Path, ledger: Ledger, state: RunState) -> None:
    await ledger.checkpoint(state)
    folder = step_folder(run_dir, state.iteration)
    folder.mkdir(parents=True)
    mark_complete(folder)
    ledger.done(state.wave)


@pytest.mark.parametrize("seals", [False, True])
async def test_a_wave_that_is_settled_before_an_older_one_does_not_begin_anew(tmp_path: Path, seals: bool) -> None:
    """schedule.window: groups of wave 1 are slow, and all of wave 2 were trained before them."""
    first, second, third = wave(1), wave(2), wave(3)
    ledger = ledger_of(tmp_path)
    await ledger.open(state_after(0), saved=0)
    await ledger.begin(1, first, ORDER, 0)
    await ledger.begin(2, second, ORDER, 1)
    await trained(ledger, 1, *second)
    state = state_after(1, ledger.digest)
    await checkpoint(tmp_path, ledger, state)
    if seals:  # the segment before is not needed any more
        await ledger._begin_segment()
        ledger.done(1)
    await ledger.close()
    assert list(segments(tmp_path)) == ([2] if seals else [1])
    order = replace(ORDER, policy_version=1)
    ledger = ledger_of(tmp_path)
    await ledger.open(state, saved=1)
    await ledger.begin(1, first, order, 0)
    await trained(ledger, 2, *first)
    await checkpoint(tmp_path, ledger, state_after(2, ledger.digest, waves=1, taken=1))  # wave 2 comes next
    assert ledger.past.size_of(2, settled=True) == 1
    assert (await ledger.begin(2, second, order, 1)).settled == {*second}
    await ledger.begin(3, third, order, 2)
    await ledger.close()
    ledger = ledger_of(tmp_path)
    assert ledger._found.problems == []
    assert ledger._found.account.settled_groups(2) == {*second}
    assert (ledger._found.account.counts["begun"], ledger._found.account.under_way) == (3, 1)
    await ledger.close()


async def test_a_process_forgets_what_it_has_settled_however_old_its_oldest_checkpoint_is(tmp_path: Path) -> None:
    """That of the best policy is kept for good."""
    ledger = ledger_of(tmp_path)
    await ledger.open(state_after(0), saved=0)
    for number in range(1, 20):
        prompts = wave(number)
        await ledger.begin(number, prompts, replace(ORDER, policy_version=number - 1), number - 1)
        await trained(ledger, number, *prompts)
        await checkpoint(tmp_path, ledger, state_after(number, ledger.digest, waves=number, taken=number))
    assert len(ledger._account.waves()) <= 1
    await ledger.close()
    assert read_ledger(tmp_path).account.waves() == set(range(2, 20))
