"""The order in which a ledger's thread writes: a slow disk delays records, and moves none before another."""

import asyncio
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.data.cursor import CursorState
from coordinator.ledger.ledger import Ledger
from coordinator.record.state import RunState
from tandem_clients.flow import Completion, Group, Order, Prompt, Sampling
from tandem_files.ledger.reading import LedgerContent, read_ledger
from tandem_files.ledger.records import segment, segments

PROMPTS = {f"i1.g{row}.row{row}": Prompt(row=row, token_ids=array("I", [row]), answer="") for row in range(3)}
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
    return Group(group_id=name, prompt=PROMPTS[name], completions=(completion,))


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


async def begun(run_dir: Path, check: Callable[[], None]) -> tuple[Ledger, RunState]:
    cursor = CursorState(sources=(), waves=0)
    state = RunState(cursor=cursor, batch_rng={}, model_fingerprint="")
    ledger = Ledger(
        run_dir=run_dir, run_id="mine", found=LedgerContent(), max_mib=1, model="", warn=pytest.fail, check=check
    )
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
