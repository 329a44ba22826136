"""The run's life: what is noted once, what waits, what the next coordinator continues, and that its end is enough."""

import asyncio
import errno
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.data.cursor import CursorState
from coordinator.leader_lease import LeaderCheck
from coordinator.record.progress import Progress
from coordinator.record.state import RunState
from coordinator.sync.excluded_replicas import LeftOut
from coordinator.watch import life as life_module
from coordinator.watch.events import EventLog
from coordinator.watch.fleet_recorder import FleetRecorder
from coordinator.watch.life import SHOWN, Life
from servicekit.errors import Fenced, Unavailable
from tandem_clients.replica import Replica
from tandem_files.ledger.life import LIFE_FILE, read_life
from tandem_files.run_folder import Scale, write_scale
from tests.fakes.sole_lead import SoleLead

REFUSED = "connection refused"


def led(run_dir: Path, lease: SoleLead | None = None) -> Life:
    life = Life(run_dir)
    life.load(LeaderCheck(lease=lease or SoleLead(), patience_s=0.0))
    return life


def working(run_dir: Path, lease: SoleLead | None = None) -> Life:
    life = led(run_dir, lease)
    life.begin(0, 0)
    return life


def said(run_dir: Path) -> list[str]:
    return [
        f"{entry.who} {entry.kind.partition(' ')[2]}: {entry.why}"
        for entry in read_life(run_dir, 1000)
        if entry.who != "coordinator"
    ]


def replica(name: str) -> Replica:
    return Replica(name, "127.0.0.1:1")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


async def test_whoever_is_lost_already_is_not_noted_again_and_whoever_is_there_does_not_come_back(
    run_dir: Path,
) -> None:
    life = led(run_dir)
    assert not life.note("redis back", "it answers")
    assert life.note("redis lost", "no answer")
    assert not life.note("redis lost", "no answer")
    assert life.note("redis back", "it answers")
    assert not life.note("redis back", "it answers")
    assert said(run_dir) == ["redis lost: no answer", "redis back: it answers"]


async def test_replicas_leave_are_lost_and_come_back(run_dir: Path) -> None:
    life = working(run_dir)
    one, two, again, third = replica("rollout-1"), replica("rollout-2"), replica("rollout-1"), replica("rollout-3")
    life.look([one, two], {})
    two.left, two.cut = True, (time.time(), 7)
    one.cut = (time.time() - 60.0, 40)
    life.look([], {"rollout-1": "no answer within 10 s"})
    life.look([again, third], {})
    life.look([again, third, later := replica("rollout-2")], {})
    life.look([third, later], {})
    assert said(run_dir)[:-1] == [
        "rollout-1 joined: at the start",
        "rollout-2 joined: at the start",
        "rollout-1 lost: no answer within 10 s",
        "rollout-2 left: it was asked to end",
        "rollout-1 back: a new process",
        "rollout-3 joined: new to the run",
        "rollout-2 joined: a new process of one that had left",
    ]
    entries = read_life(run_dir, 100)[1:]
    assert [entry.tokens for entry in entries[2:4]] == [40, 7]
    assert entries[4].seconds == pytest.approx(60.0, abs=5.0), "from the moment on at which its stream broke"
    assert (entries[4].lost, entries[4].serve) == ({}, ["rollout-1"])
    assert said(run_dir)[-1].startswith("rollout-1 lost: it does not serve")


async def test_one_that_serves_again_as_the_same_process_says_so(run_dir: Path) -> None:
    life, one = working(run_dir), replica("rollout-1")
    life.look([one], {})
    life.look([], {"rollout-1": REFUSED})
    life.look([one], {})
    assert said(run_dir)[1:] == [f"rollout-1 lost: {REFUSED}", "rollout-1 back: the same process"]


async def test_one_that_says_last_of_all_that_it_has_failed_is_lost(run_dir: Path) -> None:
    life, one = working(run_dir), replica("rollout-1")
    life.look([one], {})
    one.left = True
    life.look([], {})
    one.left, one.why = False, "out of memory"
    for _ in range(3):
        life.look([], {})
    assert said(run_dir)[1:] == ["rollout-1 left: it was asked to end", "rollout-1 lost: out of memory"]


async def test_one_whose_stream_is_open_is_noted_when_its_last_tokens_have_come(run_dir: Path) -> None:
    life, one, other = working(run_dir), replica("rollout-1"), replica("rollout-1")
    life.look([one], {})
    one._generating = 1
    life.look([], {})
    life.look([other], {})
    assert len(said(run_dir)) == 1
    one._generating, one.cut = 0, (time.time(), 12)
    life.look([other], {})
    lost, back = read_life(run_dir, 2)
    assert (lost.kind, lost.tokens, back.kind, back.why) == ("replica lost", 12, "replica back", "a new process")


async def test_one_that_evaluates_is_not_lost(run_dir: Path) -> None:
    observed = FleetRecorder(working(run_dir))
    one, two = replica("rollout-1"), replica("rollout-2")
    observed.fleet([one, two], [one, two])
    observed.lent.add(two)
    observed.fleet([one], [one])
    observed.lent.clear()
    observed.fleet([one, two], [one])
    assert said(run_dir)[2:] == ["rollout-2 lost: it does not serve: killed, frozen or cut off"]


async def test_one_that_flaps_is_quarantined(run_dir: Path) -> None:
    left_out = LeftOut(lambda _: None, led(run_dir))
    for _ in range(3):
        left_out.look([one := replica("rollout-1")], [one])
    (text,) = said(run_dir)
    assert text == (
        "rollout-1 quarantined: its last 2 processes ended before they had served for 60 s; tried again in 10 s"
    )


def state(**changes: object) -> dict[str, object]:
    return {"status": "running", "iteration": 6, "totals": {"generated_tokens": 900}, **changes}


@pytest.mark.parametrize(
    ("before", "kind", "costs"),
    [
        (state(), "coordinator took over", True),
        (state(status="failed"), "coordinator started", True),
        (state(status="interrupted"), "coordinator started", False),
    ],
)
async def test_the_next_coordinator_continues_what_was_noted(
    run_dir: Path, before: dict[str, object], kind: str, costs: bool
) -> None:
    first = working(run_dir)
    first.look([replica("rollout-0"), replica("rollout-1"), replica("rollout-2")], {})
    first.note("replica lost", "killed", who="rollout-1", since_s=time.time() - 50.0)
    first._serve.pop("rollout-1")
    first.note("trainer lost", "killed")
    (run_dir / "state.json").write_text(json.dumps(before))
    for path in run_dir.iterdir():
        os.utime(path, (time.time() - 30.0, time.time() - 30.0))
    second = led(run_dir)
    second.look([replica("rollout-0"), replica("rollout-1")], {})  # those that have got its first weights
    second.begin(4, 600)
    began, trainer, gone, back = read_life(run_dir, 4)
    assert (began.kind, began.why, began.tokens) == (kind, "after iteration 4, 6 were done", 300)
    assert (began.seconds is not None) == costs
    if costs:
        assert began.seconds == pytest.approx(30.0, abs=5.0), "since the last sign of the one before"
    assert (trainer.kind, trainer.tokens) == ("trainer back", 0)
    assert (gone.who, gone.kind, gone.tokens) == ("rollout-2", "replica lost", None)
    assert gone.why == "it did not serve when the coordinator began"
    assert (back.who, back.kind) == ("rollout-1", "replica back")
    assert back.seconds == pytest.approx(50.0, abs=5.0)
    assert back.totals["replica lost"] == [2, 0.0, 0]
    assert back.totals["replica joined"][0] == 3, "who serves on does not join again"


async def test_a_trainer_that_starts_from_a_checkpoint_costs_its_iterations(run_dir: Path) -> None:
    life = led(run_dir)
    life.begin(0, 0)
    life.note("trainer lost", "killed", since_s=time.time() - 20.0)
    life.begins("trainer restarted", 5, 500)
    life.begin(4, 400)
    entry = read_life(run_dir, 1)[0]
    assert (entry.kind, entry.why, entry.tokens) == ("trainer restarted", "after iteration 4, 5 were done", 100)
    assert entry.seconds == pytest.approx(20.0, abs=5.0)


class NoDisk:
    """In the place of append_json."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: object) -> None:
        raise self.error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), Unavailable("no answer"), Fenced("replaced")])
async def test_what_cannot_be_written_waits_and_ends_no_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    life = led(run_dir)
    with monkeypatch.context() as patched:
        patched.setattr(life_module, "append_json", NoDisk(error))
        life.note("disk full", "no space left")
        assert [entry.kind for entry in life.newest] == ["disk full"]
    assert said(run_dir) == []
    life.note("disk room", "the run continues")
    assert said(run_dir) == ["disk full: no space left", "disk room: the run continues"]


async def test_redis_is_not_asked_for_it(run_dir: Path) -> None:
    lease = SoleLead()
    life = working(run_dir, lease)
    lease.left_s = 0.0
    life.note("redis lost", "no answer")
    assert said(run_dir) == []
    lease.left_s = 5.0
    life.look([], {})
    assert said(run_dir) == ["redis lost: no answer"]


async def test_a_full_disk_is_noted_until_there_is_room(run_dir: Path) -> None:
    progress = Progress(
        state=RunState(cursor=CursorState(sources=()), batch_rng={}, model_fingerprint="x"),
        events=EventLog(),
        limits={},
        life=led(run_dir),
    )
    tries = [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "full"), None]

    def write() -> None:
        if (error := tries.pop(0)) is not None:
            raise error

    async with asyncio.timeout(10.0):
        await progress.until_room(write, 60.0)
    assert [entry.kind for entry in read_life(run_dir, 5)] == ["disk full", "disk room"]
    assert progress.state.totals.warnings == 1
    tries[:] = [OSError(errno.EIO, "broken")]
    with pytest.raises(OSError, match="broken"):
        await progress.until_room(write, 60.0)
    assert len(read_life(run_dir, 5)) == 2


async def test_a_torn_line_costs_itself_only(run_dir: Path) -> None:
    led(run_dir).note("redis lost", "no answer")
    with (run_dir / LIFE_FILE).open("a") as file:
        file.write('{"time_s": 1.0, "kind": "redis ba')
    life = led(run_dir)
    life.note("redis back", "it\nanswers " + "x" * 999)
    lost, back = said(run_dir)
    assert (lost, back[:24], len(back)) == (
        "redis lost: no answer",
        "redis back: it answers x",
        len("redis back: ") + 300,
    )


async def test_a_replica_that_flaps_ten_thousand_times_makes_nothing_slow(run_dir: Path) -> None:
    life = led(run_dir)
    life.note("replica lost", "killed", who="rollout-1", tokens=5)
    last = replace(life.newest[-1], totals={"replica lost": [10_000, 0.0, 50_000]})
    line = (json.dumps(vars(last)) + "\n").encode()
    (run_dir / LIFE_FILE).write_bytes(line * 100_000)
    begun_s = time.process_time()
    entries = read_life(run_dir, SHOWN)
    assert time.process_time() - begun_s < 0.1
    assert len(entries) == SHOWN
    again = led(run_dir)
    again.note("replica back", "a new process", who="rollout-1")
    assert again.newest[-1].totals["replica lost"] == [10_000, 0.0, 50_000]
    assert len(again.newest) == SHOWN


def test_of_what_another_release_has_written_the_rest_is_read(run_dir: Path) -> None:
    assert read_life(run_dir, 10) == []
    line = {"time_s": 1.0, "kind": "moon full", "who": "moon", "phase": 4}
    (run_dir / LIFE_FILE).write_text(json.dumps(line) + "\n")  # of a newer release
    assert [entry.who for entry in read_life(run_dir, 10)] == ["moon"]
    (run_dir / LIFE_FILE).write_bytes(b'[]\n{"kind": 1}\n\xff\xfe\nnull\n')
    assert read_life(run_dir, 10) == []


async def test_a_replica_of_which_there_is_no_need_since_a_resume_has_left_and_is_not_lost(run_dir: Path) -> None:
    working(run_dir).look([replica(f"rollout-{number}") for number in range(3)], {})
    write_scale(run_dir, Scale(replicas=2, configured=2))  # what the next launch begins with
    life = led(run_dir)
    life.look([replica("rollout-0")], {})
    life.begin(0, 0)
    assert said(run_dir)[3:] == [
        "rollout-1 lost: it did not serve when the coordinator began",
        "rollout-2 left: fewer were asked for before the coordinator began",
    ]
    assert read_life(run_dir, 1)[0].lost.keys() == {"rollout-1"}
