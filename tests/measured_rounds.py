"""Rounds measured beside rounds simulated: speeds of this machine, taken in the same run, and real fleets over gloo.

`python -m tests.measured_rounds [--json FILE]` prints the table of docs/weight-sync.md.
"""

import argparse
import json
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.conftest import RedisProcess
from tests.sync_fleet import Fleet
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec
from weightsync.plans.cost import Speeds
from weightsync.plans.messages import cut_messages
from weightsync.plans.plan import make_plan
from weightsync.plans.round_plan import source_layout
from weightsync.round.phases import ROUND
from weightsync.simulate.phases import SimulatedFleet
from weightsync.simulate.round import RoundScenario, simulate
from weightsync.transfer.communicators.communicator import Communicator, form, join_store
from weightsync.transfer.communicators.tcp_store import bound_store
from weightsync.transfer.digest import PayloadDigest

BUCKET_BYTES = 4 * 2**20
_CALLED = {rule.name: rule.phase for rule in ROUND}
PHASES = tuple(_CALLED)
# How far two looks at the machine's speeds may be apart for the time between them to count.
STEADY = 1.25


class UnsteadyMachine(RuntimeError):
    """Other work on the machine came and went all the time."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's width (megabytes grow with its square), and who takes part."""

    hidden: int
    trainer: Parallel
    rollout: Parallel
    replicas: int

    @property
    def spec(self) -> ModelSpec:
        config = {
            "model_type": "qwen3",
            "num_hidden_layers": 4,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": self.hidden // 8,
            "vocab_size": 4000,
            "max_position_embeddings": 64,
        }
        return ModelSpec.from_config(config)


CASES = tuple(
    Case(hidden=hidden, trainer=trainer, rollout=rollout, replicas=replicas)
    for hidden in (256, 512, 1024)
    for trainer, rollout, replicas in (
        (Parallel(tensor=2), Parallel(), 1),
        (Parallel(tensor=2), Parallel(), 2),
        (Parallel(tensor=2), Parallel(), 4),
        (Parallel(tensor=2), Parallel(tensor=2), 1),
    )
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Medians of the measured rounds, and of one simulation for each of them, in seconds by phase and "total".

    ratio: median of simulated / measured total, round by round: each is simulated with the speeds just before and
    after it, because other work on the machine comes and goes.
    """

    case: Case
    shard_bytes: int
    rounds: int
    rounds_tried: int
    measured: dict[str, float]
    simulated: dict[str, float]
    ratio: float
    speeds: Speeds


@contextmanager
def fleet_of(case: Case, redis_url: str) -> Iterator[Fleet]:
    """A fleet for a case, closed at the end."""
    fleet = Fleet(redis_url, case.spec, case.trainer, {f"rollout-{i}": case.rollout for i in range(case.replicas)})
    try:
        yield fleet
    finally:
        fleet.close()


def compare(case: Case, redis_url: str, rounds: int = 7) -> Compared:
    """Measures speeds and rounds in turns, and simulates each round.

    A round counts if the machine was as fast after it as before it, so that its own speed is known; up to four times
    `rounds` are tried.
    """
    stage = _stage(case)
    taken: list[dict[str, float]] = []
    simulated: list[dict[str, float]] = []
    counted: list[Speeds] = []
    tried = 0
    with fleet_of(case, redis_url) as fleet, pair() as ends:
        timed_round(fleet, 1)  # forms the communicator, plans, fills caches
        before = measure_speeds(ends, len(fleet.members))
        while len(taken) < rounds and tried < 4 * rounds:
            tried += 1
            measured = timed_round(fleet, tried + 1)
            after = measure_speeds(ends, len(fleet.members))
            if _steady(before, after):
                taken.append(measured)
                counted.append(mean_speeds([before, after]))
                simulated.append(simulate(_scene(stage, counted[-1], measured)).seconds)
            before = after
    if not taken:
        raise UnsteadyMachine(f"speeds changed by more than {STEADY} in each of {tried} rounds")
    return Compared(
        case=case,
        shard_bytes=stage.plan.target.elements_of(0) * 4,
        rounds=len(taken),
        rounds_tried=tried,
        measured=_medians(taken),
        simulated=_medians(simulated),
        ratio=statistics.median(ours["total"] / real["total"] for ours, real in zip(simulated, taken, strict=True)),
        speeds=mean_speeds(counted),
    )


def _steady(before: Speeds, after: Speeds) -> bool:
    changes = [after.trainer_link / before.trainer_link, after.link_cores / before.link_cores]
    return all(1 / STEADY <= change <= STEADY for change in changes)


def _stage(case: Case) -> SimulatedFleet:
    plan = make_plan(source_layout(case.spec, case.trainer), sglang_layout(case.spec, case.rollout))
    messages = cut_messages(plan, BUCKET_BYTES // 4)
    return SimulatedFleet(
        plan=plan, messages=messages, dtype_bytes=4, replicas=case.replicas, speeds=Speeds(), device="cpu"
    )


def _scene(stage: SimulatedFleet, speeds: Speeds, measured: dict[str, float]) -> RoundScenario:
    """A call costs what PAUSE takes, which does nothing else; planning and agreeing, what PREPARE takes beyond."""
    rpc_s = measured["pause"]
    prepare_s = max(0.0, measured["prepare"] - rpc_s)
    return RoundScenario(fleet=replace(stage, speeds=replace(speeds, rpc_s=rpc_s), prepare_s=prepare_s))


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}


def timed_round(fleet: Fleet, version: int) -> dict[str, float]:
    """Seconds of each phase of a real round, called as a coordinator does, and in total."""
    round_ = fleet.round(
        version, bucket_bytes=BUCKET_BYTES, transport=pb.SYNC_TRANSPORT_COLLECTIVE, transfer_timeout_s=60
    )
    seconds = {}
    for name, phase in _CALLED.items():
        start = time.perf_counter()
        for result in fleet.run(phase, round_).values():
            if isinstance(result, Exception):
                raise result
        seconds[name] = time.perf_counter() - start
    return {**seconds, "total": sum(seconds.values())}


# ---- the machine's speeds ----


@contextmanager
def pair() -> Iterator[list[list[Communicator]]]:
    """Two pairs of connected ranks."""
    pairs = []
    for number in range(2):
        store, port = bound_store("127.0.0.1", 10)

        def joined(rank: int, store: Any = store, port: int = port, number: int = number) -> Communicator:
            mine = store if rank == 0 else join_store(f"127.0.0.1:{port}", 10)
            return form(
                mine,
                name=f"speed{number}",
                rank=rank,
                slots=("a", "b"),
                host="127.0.0.1",
                device=torch.device("cpu"),
                timeout_s=10,
            )

        with ThreadPoolExecutor(2) as pool:
            pairs.append(list(pool.map(joined, range(2))))
    try:
        yield pairs
    finally:
        for ends in pairs:
            for end in ends:
                end.abort()


def measure_speeds(pairs: list[list[Communicator]], threads: int) -> Speeds:
    """Each of the machine's speeds once; about 0.3 s. Memory is walked through, as in a round: caches do not help."""
    link, links = _link_rate(pairs[:1]), _link_rate(pairs)
    cores = max(1.0, _rate(_copy, threads) / (copy := _rate(_copy, 1)))
    piece_s = _message_s(pairs, window=64)
    return Speeds(
        trainer_link=link,
        rollout_link=link,
        latency_s=max(0.0, 2 * _message_s(pairs, window=2) - piece_s),
        segment_s=piece_s / 4,  # two pairs, two ends each
        copy=copy,
        digest=_rate(_digest, 1),
        op_s=_small_copy_s(),
        cores=cores,
        # Two pairs at once go 2 x cores / (2 x link_cores) as fast as one alone, if that is less than 2.
        link_cores=max(0.5, min(2.0, cores * link / links)),
    )


def mean_speeds(samples: Sequence[Speeds]) -> Speeds:
    """By field."""
    fields = [asdict(sample) for sample in samples]
    return Speeds(**{name: statistics.mean(sample[name] for sample in fields) for name in fields[0]})


_NUM_PAYLOADS = 32
_ARENA = torch.zeros(_NUM_PAYLOADS, BUCKET_BYTES, dtype=torch.uint8)


def _digest(number: int) -> None:
    digest = PayloadDigest()
    digest.update(_ARENA[number % _NUM_PAYLOADS])
    digest.digest()


def _copy(number: int) -> None:
    """A payload's worth of half rows."""
    pages = _ARENA.view(torch.float32).view(-1, 2048, 1024)[number % (_NUM_PAYLOADS // 2)]
    pages[:1024].copy_(pages[1024:, :])


def _rate(work: Callable[[int], None], threads: int, times: int = 8) -> float:
    """Bytes/s of so many threads that each handle `times` payloads."""

    def repeat(thread: int) -> None:
        for number in range(times):
            work(thread * times + number)

    return threads * times * BUCKET_BYTES / _together([partial(repeat, thread) for thread in range(threads)])


def _small_copy_s(times: int = 256) -> float:
    rows = _ARENA.view(torch.float32)

    def repeat() -> None:
        for number in range(times):
            rows[0, number * 64 : number * 64 + 64].copy_(rows[1, :64])

    return _together([repeat]) / times


def _link_rate(pairs: list[list[Communicator]], times: int = 12) -> float:
    """Bytes/s of all pairs together, two messages in flight."""
    work = []
    for number, ends in enumerate(pairs):
        mine = list(_ARENA[number * 16 : number * 16 + 16])
        work.append(partial(_stream, ends[0].send, ends[0], 1, mine[:8], times))
        work.append(partial(_stream, ends[1].receive, ends[1], 0, mine[8:], times))
    return len(pairs) * times * BUCKET_BYTES / _together(work)


def _message_s(pairs: list[list[Communicator]], window: int, times: int = 64) -> float:
    """Seconds per message of a few bytes, on all pairs at once."""
    work = []
    for ends in pairs:
        buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(4)]
        work.append(partial(_stream, ends[0].send, ends[0], 1, buffers[:2], times, window))
        work.append(partial(_stream, ends[1].receive, ends[1], 0, buffers[2:], times, window))
    return _together(work) / times


def _together(work: Sequence[Callable[[], None]]) -> float:
    """Seconds until all are done, each in a thread of its own, from when all threads are there."""
    barrier = threading.Barrier(len(work) + 1)

    def begin(one: Callable[[], None]) -> None:
        barrier.wait(10)
        one()

    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(begin, one) for one in work]
        barrier.wait(10)
        start = time.perf_counter()
        for future in futures:
            future.result()
        return time.perf_counter() - start


def _stream(
    start: Callable[..., Any],
    end: Communicator,
    peer: int,
    buffers: list[torch.Tensor],
    times: int,
    window: int = 2,
) -> None:
    pending: list[Any] = []
    for number in range(times):
        if len(pending) == window:
            end.wait(pending.pop(0), peer, 10)
        pending.append(start(buffers[number % len(buffers)], peer, number))
    for one in pending:
        end.wait(one, peer, 10)


# ---- the table ----


def main() -> None:
    """Prints the comparison of every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    server = RedisProcess()
    server.start()
    rows = []
    try:
        for case in CASES:
            try:
                rows.append(compare(case, server.url, arguments.rounds))
            except UnsteadyMachine as error:
                print(f"{case}: not measured: {error}", flush=True)
            else:
                print(_row(rows[-1]), flush=True)
    finally:
        server.close()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([_as_json(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _row(row: Compared) -> str:
    case, ms = row.case, 1000.0
    who = f"{case.trainer.tensor} -> {case.replicas} x {case.rollout.tensor}"
    phases = " | ".join(
        f"{row.measured[name] * ms:.1f} / {row.simulated[name] * ms:.1f}" for name in ("transfer", "verify", "total")
    )
    return f"| {row.shard_bytes / 2**20:.0f} | {who} | {phases} | {row.ratio:.2f} |"


def _as_json(row: Compared) -> dict[str, Any]:
    return asdict(row)


if __name__ == "__main__":
    main()
