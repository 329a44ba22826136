"""Runs one case of gpu-check in processes: rounds, their times, and whether the received weights are exact."""

import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.gpu_check.cases import Case
from tools.gpu_check.rank import ANSWER_S, rank_main
from weightsync.round.phases import ROUND, Role

PHASES = tuple(rule.name.upper() for rule in ROUND if Role.RANK in rule.roles)


@contextmanager
def redis_url() -> Iterator[str]:
    """Run a private Redis server on a Unix socket. Yields: its URL."""
    from launcher.run.redis_server import find_server

    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        socket = Path(folder) / "s"
        server = subprocess.Popen(
            [str(find_server()), "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        try:
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait(timeout=10)


def run_case(case: Case, url: str, *, layers: int, hidden: int, rounds: int) -> dict[str, Any]:
    """Start the processes of a case, measure it and end them; a failure is part of the result.

    Args:
        url: of the Redis server.
        layers: of the random model.
        hidden: its hidden size.
        rounds: measured rounds.
    """
    context = multiprocessing.get_context("spawn")
    slots = [f"trainer/{rank}" for rank in range(case.trainer)] + [f"rollout-0/{rank}" for rank in range(case.rollout)]
    ends: dict[str, Connection] = {}
    processes = []
    for place, slot in enumerate(slots):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=rank_main,
            args=(case, slot, place % case.num_gpus, url, (layers, hidden), theirs),
            name=slot,
            daemon=True,
        )
        process.start()
        processes.append(process)
        ends[slot] = ours
    result: dict[str, Any] = {"name": case.name, "exact": False}
    try:
        result |= measure(case, ends, rounds)
    except (RuntimeError, EOFError, OSError) as error:
        result["error"] = str(error) or type(error).__name__
    finally:
        for process in processes:
            process.terminate()
            process.join(timeout=30)
    return result


def measure(case: Case, ends: dict[str, Connection], rounds: int) -> dict[str, Any]:
    """Run the rounds; each sends other weights than the one before it.

    Returns: medians of seconds by phase, GB/s, and the parameters that are not exact after the last round.
    """
    shard_bytes = {slot: answer(end, slot) for slot, end in ends.items()}
    timed: list[dict[str, float]] = []
    for version in range(1, rounds + 2):
        command_all(ends, "CHANGE", version)
        seconds = {}
        for phase in PHASES:
            start = time.perf_counter()
            command_all(ends, phase, version)
            seconds[phase.lower()] = time.perf_counter() - start
        timed.append({**seconds, "total": sum(seconds.values())})
    receivers = {slot: end for slot, end in ends.items() if not slot.startswith("trainer")}
    wrong = [name for names in command_all(receivers, "CHECK", 0).values() for name in names]
    medians = {name: statistics.median(row[name] for row in timed[1:]) for name in timed[0]}
    moved = sum(shard_bytes[slot] for slot in receivers)
    segments = max(command_all(receivers, "SEGMENTS", 0).values())
    return {
        "exact": not wrong,
        "wrong": wrong,
        "bytes": moved,
        "seconds": medians,
        "gb_per_s": moved / medians["transfer"] / 1e9,
        "segments": segments,  # of the receiver that has most
        "segments_per_s": segments / medians["transfer"],
        "gpus": case.num_gpus,
        "peak_bytes": command_all(ends, "PEAK", 0),
    }


def command_all(ends: dict[str, Connection], what: str, version: int) -> dict[str, Any]:
    """Send a command to ranks, which run it concurrently. Returns: their answers, by slot."""
    for end in ends.values():
        end.send((what, version))
    return {slot: answer(end, slot) for slot, end in ends.items()}


def answer(end: Connection, slot: str) -> Any:
    """Wait for a rank's answer. Raises: RuntimeError: the rank's error, or no answer in time."""
    if not end.poll(ANSWER_S):
        raise RuntimeError(f"{slot} did not answer in {ANSWER_S:g} s")
    kind, value = end.recv()
    if kind == "error":
        raise RuntimeError(f"{slot}: {value}")
    return value
