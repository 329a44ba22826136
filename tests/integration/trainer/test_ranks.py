"""Rank 0 and its followers as real processes, without a model: replies, refusals, failures, deaths.

As a module, this is one rank: it meets the others, then commands or follows. Arguments: rank, world size, scenario.
Rank 0 prints a JSON line per command, and what failed at the end.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from servicekit.environment import ServiceEnvironment
from servicekit.errors import DigestMismatch, TandemError
from servicekit.redis.registry import Registry
from tests.kit.forked import ForkedProcess
from tests.kit.processes import zygote
from tests.kit.waiting import until
from trainer_service.ranks.commands import FRAME_BYTES, Command, Commander, Wire, follow
from trainer_service.ranks.liveness import Liveness
from trainer_service.ranks.world import STORE_KEY, Place, connect, device_of, meet

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Rank:
    """A rank, whose output goes to a file."""

    process: ForkedProcess
    path: Path

    def lines(self) -> list[dict[str, Any]]:
        """What it has printed so far; its log is in the same file."""
        return [json.loads(line) for line in self.path.read_text().splitlines() if line.startswith('{"')]

    def wait_met(self) -> None:
        until(lambda: any("met" in line for line in self.lines()), 60.0, "a rank that has met the others")


Ranks = list[Rank]


@pytest.fixture
def start(redis_server: str, tmp_path: Path) -> Iterator[Callable[[str], Ranks]]:
    """start(scenario) -> three ranks."""
    environment = {**os.environ, "REDIS_URL": redis_server, "OMP_NUM_THREADS": "1"}
    started: Ranks = []

    def ranks(scenario: str) -> Ranks:
        for rank in range(3):
            module = ["tests.integration.trainer.test_ranks", str(rank), "3", scenario]
            path = tmp_path / f"rank-{rank}.out"
            with path.open("wb") as file:
                started.append(Rank(zygote("trainer_service").start(module, environment, file.fileno()), path))
        return started

    yield ranks
    for rank in started:
        rank.process.kill()
        rank.process.wait(timeout=10)


def output(rank: Rank) -> list[dict[str, Any]]:
    """Everything that a rank printed, once it has ended."""
    rank.process.wait(timeout=60)
    return rank.lines()


def test_replies_refusals_and_stop(start: Callable[[str], Ranks], redis_server: str) -> None:
    # the address of an earlier start that is no more
    Registry(redis_server, "ranks-test").set_value(STORE_KEY, "127.0.0.1 1 0123456789abcdef")
    ranks = start("works")
    lines = output(ranks[0])[1:]
    assert lines[0] == {"replies": ["0:one||three", "1:one||three", "2:one||three"]}
    assert lines[1] == {"refused": "DigestMismatch", "message": "trainer rank 1: bucket 3"}
    assert lines[2] == {"replies": ["0:", "1:", "2:"]}
    whole = [f"{rank}:{'|'.join(part.decode() for part in LONG)}" for rank in range(3)]
    assert [line["replies"] for line in lines[3:]] == [
        [f"{rank}:{'x' * size}" for rank in range(3)] for size in EDGES
    ] + [whole]
    assert [rank.process.wait(timeout=30) for rank in ranks] == [0, 0, 0]


def test_unexpected_error_ends_every_rank_and_is_named(start: Callable[[str], Ranks]) -> None:
    ranks = start("fails")
    assert output(ranks[0])[-1]["failed"] == "rank 1: KeyError: 'lost parameter'"
    assert [rank.process.wait(timeout=30) for rank in ranks] == [1, 1, 1]


def test_killed_rank_is_named(start: Callable[[str], Ranks]) -> None:
    ranks = start("dies")
    assert output(ranks[0])[-1]["failed"].startswith("rank 1: killed or hanging")
    assert [rank.process.wait(timeout=30) for rank in ranks] == [1, -signal.SIGKILL, 1]


def test_a_frozen_rank_is_named_after_the_commands_own_deadline(start: Callable[[str], Ranks]) -> None:
    ranks = start("freezes")
    lines = output(ranks[0])
    assert lines[1] == {"replies": ["0:", "1:", "2:"]}
    assert lines[-1]["failed"].startswith("rank 1: killed or hanging")
    assert "Timed out waiting 3000ms" in lines[-1]["failed"]  # not the group's 30 s


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_wait_for_one_that_writes_for_longer_than_a_collective_may(
    start: Callable[[str], Ranks], slow: int
) -> None:
    """A profile, a file: the others have done their part, and neither send it nor get the next command meanwhile."""
    ranks = start(f"slow {slow}")
    assert [line["replies"] for line in output(ranks[0])[1:]] == [["0:", "1:", "2:"]] * 2
    assert [rank.process.wait(timeout=30) for rank in ranks] == [0, 0, 0]


def test_followers_end_when_rank_0_is_killed(start: Callable[[str], Ranks]) -> None:
    ranks = start("idle")
    for rank in ranks:
        rank.wait_met()
    ranks[0].process.kill()
    assert [rank.process.wait(timeout=30) for rank in ranks[1:]] == [1, 1]


# Bodies that just fit into the frame of a command or of an outcome, and that just do not: a part's length takes 8 bytes
# of the former, and "0:" two of the latter.
EDGES = tuple(FRAME_BYTES + more for more in (-9, -8, -7, -3, -2, -1))
LONG = [b"a" * 3 * FRAME_BYTES, b"", b"b" * 7]
# Much less than the 30 s of the control group's own collectives.
PATIENCE_S = 3.0
# Of "slow" scenarios: the control group's timeout, and what one rank's part takes in a command without a deadline.
SHORT_S, SLOW_S = 2.5, 4.0


def write(_: Sequence[bytes]) -> bytes:
    if sys.argv[3] == f"slow {sys.argv[1]}":
        time.sleep(SLOW_S)
    return f"{sys.argv[1]}:".encode()


def handlers(rank: int) -> dict[Command, Any]:
    def reply(parts: Sequence[bytes]) -> bytes:
        return f"{rank}:".encode() + b"|".join(parts)

    def refuse(_: Sequence[bytes]) -> bytes:
        if rank == 1:
            raise DigestMismatch("bucket 3")
        return b""

    def fail(_: Sequence[bytes]) -> bytes:
        if rank == 1:
            raise KeyError("lost parameter")
        dist.barrier()
        return b""

    def die(_: Sequence[bytes]) -> bytes:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return b""

    def freeze(_: Sequence[bytes]) -> bytes:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return b""

    return {
        Command.TRAIN_STEP: write,
        Command.RESTORE: freeze,
        Command.SAVE: reply,
        Command.EXPORT: refuse,
        Command.LOGPROBS: fail,
        Command.PUBLISH: die,
    }


SCENARIOS: dict[str, list[tuple[Command, list[bytes]]]] = {
    "works": [
        (Command.SAVE, [b"one", b"", b"three"]),
        (Command.EXPORT, []),
        (Command.SAVE, []),
        *((Command.SAVE, [b"x" * size]) for size in EDGES),
        (Command.SAVE, LONG),
        (Command.STOP, []),
    ],
    "fails": [(Command.LOGPROBS, [])],
    "dies": [(Command.PUBLISH, [])],
    "freezes": [(Command.SAVE, []), (Command.RESTORE, [])],
    "idle": [],
    **{f"slow {rank}": [(Command.TRAIN_STEP, []), (Command.TRAIN_STEP, []), (Command.STOP, [])] for rank in range(2)},
}


def show(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def command(commander: Commander, scenario: str) -> None:
    patience_s = None if scenario.startswith("slow") else PATIENCE_S
    for each, parts in SCENARIOS[scenario]:
        try:
            replies = commander.submit(each, parts, patience_s).result(timeout=30)
            if each is not Command.STOP:  # the process may end first
                show(replies=[reply.decode() for reply in replies])
        except TandemError as error:
            show(refused=type(error).__name__, message=str(error))


def main() -> None:
    rank, world_size, scenario = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    place = Place(rank=rank, world_size=world_size, local_rank=rank, master=None)
    registry = Registry(os.environ["REDIS_URL"], "ranks-test")
    environment = ServiceEnvironment.model_validate(
        {"REDIS_URL": os.environ["REDIS_URL"], "TANDEM_RUN_ID": "ranks-test", "TANDEM_RUN_DIR": Path.cwd()}
    )
    store = meet(place, registry, environment, 30.0)
    liveness = Liveness(store, rank, world_size)
    liveness.start(lambda _: None)
    timeout_s = SHORT_S if scenario.startswith("slow") else 30.0
    wire = Wire(connect(place, store, device_of(place), "127.0.0.1", timeout_s), timeout_s)
    show(met=rank)
    try:
        if rank == 0:
            commander = Commander()
            threading.Thread(target=command, args=(commander, scenario), daemon=True).start()
            commander.run(wire, handlers(rank))
        else:
            follow(wire, handlers(rank))
    except Exception as error:  # noqa: BLE001 - the boundary of the rank
        with contextlib.suppress(RuntimeError):  # rank 0 is lost
            liveness.report(error)
        if rank == 0:
            show(failed=liveness.diagnose(error))
        os._exit(1)
    liveness.end()
    os._exit(0)


if __name__ == "__main__":
    main()
