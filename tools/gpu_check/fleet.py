"""A fleet of processes around one case of gpu-check: rounds, their times, and whether what arrived is exact."""

import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.gpu_check.cases import Case
from tools.gpu_check.weights import numbered, random_spec

PHASES = ("PREPARE", "TRANSFER", "VERIFY", "COMMIT")
ANSWER_S = 180.0
GROUP = "tandem:gpu-check"


@contextmanager
def redis_url() -> Iterator[str]:
    """A Redis server of our own, on a Unix socket."""
    from launcher.redis_server import find_server

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
    """One fleet of processes, from start to end. A failure is part of the result."""
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
    """Runs the rounds; each sends other weights than the one before.

    Returns: medians of seconds by phase, GB/s, and the parameters that are not exact after the last round.
    """
    shard_bytes = {slot: answer(end, slot) for slot, end in ends.items()}
    timed: list[dict[str, float]] = []
    for version in range(1, rounds + 2):
        tell(ends, "CHANGE", version)
        seconds = {}
        for phase in PHASES:
            start = time.perf_counter()
            tell(ends, phase, version)
            seconds[phase.lower()] = time.perf_counter() - start
        timed.append({**seconds, "total": sum(seconds.values())})
    receivers = [slot for slot in ends if not slot.startswith("trainer")]
    wrong = [name for names in tell({slot: ends[slot] for slot in receivers}, "CHECK", 0).values() for name in names]
    medians = {name: statistics.median(row[name] for row in timed[1:]) for name in timed[0]}
    moved = sum(shard_bytes[slot] for slot in receivers)
    return {
        "exact": not wrong,
        "wrong": wrong,
        "bytes": moved,
        "seconds": medians,
        "gb_per_s": moved / medians["transfer"] / 1e9,
        "gpus": case.num_gpus,
        "peak_bytes": tell(ends, "PEAK", 0),
    }


def tell(ends: dict[str, Connection], what: str, version: int) -> dict[str, Any]:
    """Has all of these ranks do something at once. Returns: their answers, when all have done it."""
    for end in ends.values():
        end.send((what, version))
    return {slot: answer(end, slot) for slot, end in ends.items()}


def answer(end: Connection, slot: str) -> Any:
    """A rank's answer. Raises: RuntimeError: its error, or that none came."""
    if not end.poll(ANSWER_S):
        raise RuntimeError(f"{slot} did not answer in {ANSWER_S:g} s")
    kind, value = end.recv()
    if kind == "error":
        raise RuntimeError(f"{slot}: {value}")
    return value


def rank_main(case: Case, slot: str, gpu: int, url: str, size: tuple[int, int], end: Connection) -> None:
    """One rank: a SyncMember with tensors on its GPU, told phase by phase what to do."""
    import torch

    device = torch.device(case.device, gpu) if case.device == "cuda" else torch.device(case.device)
    if case.device == "cuda":
        torch.cuda.set_device(device)
    try:
        act = make_rank(case, slot, device, url, random_spec(*size))
        end.send(("ok", act("BYTES", 0)))
        while True:
            phase, version = end.recv()
            end.send(("ok", in_foreign_thread(act, phase, version)))
    except EOFError:
        return
    except Exception as error:
        end.send(("error", f"{type(error).__name__}: {error}"))


def in_foreign_thread(act: Callable[[str, int], Any], phase: str, version: int) -> Any:
    """As gRPC's threads run phases: whatever names no device is done to GPU 0 there. Raises: what `act` raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act, phase, version).result(timeout=ANSWER_S)


def make_rank(case: Case, slot: str, device: Any, url: str, spec: Any) -> Callable[[str, int], Any]:
    """Builds a rank's tensors and its member.

    Returns: what does a phase, changes the weights (or what is expected of them), checks, or tells the shard's bytes.
    """
    import torch

    from tandem_api.weights.v1 import weights_pb2 as pb
    from weightsync.devices import wait_for_device
    from weightsync.layout import Parallel
    from weightsync.megatron_layout import megatron_layout
    from weightsync.participants import Participants
    from weightsync.session import SyncMember
    from weightsync.sglang_layout import sglang_layout

    trainer, rollout = Parallel(tensor=case.trainer), Parallel(tensor=case.rollout)
    is_trainer, rank = slot.startswith("trainer"), int(slot.rpartition("/")[2])
    layout = megatron_layout(spec, trainer) if is_trainer else sglang_layout(spec, rollout)
    expected = {name: t.to(device) for name, t in numbered(layout, rank).items()}
    tensors = expected if is_trainer else {name: torch.full_like(t, torch.nan) for name, t in expected.items()}
    own = trainer if is_trainer else rollout
    member = SyncMember(spec=spec, slot=slot, parallel=own, tensors=tensors, redis_url=url, group=GROUP)
    member.start()

    def act(phase: str, version: int) -> Any:
        if phase == "BYTES":
            return sum(t.numel() * t.element_size() for t in tensors.values())
        if phase == "CHANGE":  # so that neither old parameters nor an old spare shard could pass for new ones
            for tensor in expected.values():
                tensor.neg_()
            return None
        if phase == "PEAK":
            return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        if phase == "CHECK":
            return [f"{slot} {name}" for name, t in expected.items() if not torch.equal(tensors[name], t)]
        round_ = pb.Round(
            allow_staged_nccl=True,  # there is no engine here whose collectives would be beside it
            round_id=f"{case.name}-{version}",
            policy_version=version,
            group=GROUP,
            trainer=trainer.to_proto(),
            replicas=[pb.ReplicaSpec(name="rollout-0", parallel=rollout.to_proto())],
            install_mode=pb.InstallMode.Value(f"INSTALL_MODE_{case.install.upper()}"),
            transport=pb.SyncTransport.Value(f"SYNC_TRANSPORT_{case.transport.upper()}"),
            bucket_bytes=256 * 2**20,
            formation_timeout_s=120,
            transfer_timeout_s=120,
        )
        slots = Participants.of_round(round_).slots
        round_.epoch = member._lease.rendezvous.wait_for(slots, 60).epoch
        member.run_phase(pb.RoundPhase.Value(f"ROUND_PHASE_{phase}"), round_)
        wait_for_device(device)
        return None

    return act
