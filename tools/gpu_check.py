"""Weight sync on real GPUs: exactness, and GB/s against the device's own copies. `make gpu-check`.

Runs what the machine allows, writes benchmarks/gpu/<device>.json, and says what it skipped and why:

    collective   trainer ranks and receivers over NCCL, a GPU each; or several ranks on one GPU, where NCCL is at least
                 2.31 and NCCL_MULTI_RANK_GPU_ENABLE=1
    colocated    CUDA IPC between processes on one GPU
    floor        device-to-device copy, and device-to-device copy between GPUs where there are two

Without a GPU it says so and exits 0. Nobody has run it on a GPU yet.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu"
PHASES = ("PREPARE", "TRANSFER", "VERIFY", "COMMIT")
ANSWER_S = 180.0
MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
MULTI_RANK_NCCL = (2, 31)
GROUP = "tandem:gpu-check"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fleet: trainer TP -> one replica of rollout TP, over a transport; ranks take GPUs in turn."""

    name: str
    transport: str
    trainer: int
    rollout: int
    install: str
    num_gpus: int
    device: str = "cuda"


def cases(num_gpus: int, nccl: tuple[int, ...], *, multi_rank: bool) -> tuple[list[Case], list[str]]:
    """What runs on so many GPUs, and what is skipped, in words."""
    chosen, skipped = [], []
    for trainer, rollout in ((1, 1), (2, 1), (2, 2)):
        ranks = trainer + rollout
        name = f"collective TP{trainer} -> TP{rollout}"
        if num_gpus >= ranks or multi_rank:
            gpus = min(num_gpus, ranks)
            chosen += [
                Case(
                    name=f"{name} {install}",
                    transport="collective",
                    trainer=trainer,
                    rollout=rollout,
                    install=install,
                    num_gpus=gpus,
                )
                for install in ("in_place", "staged")
            ]
        else:
            skipped.append(
                f"{name}: {num_gpus} GPUs for {ranks} ranks, and several ranks per GPU need NCCL >= 2.31 "
                f"(this is {'.'.join(map(str, nccl))}) with {MULTI_RANK}=1"
            )
    chosen += [
        Case(
            name=f"colocated TP{trainer} -> TP{rollout} {install}",
            transport="colocated",
            trainer=trainer,
            rollout=rollout,
            install=install,
            num_gpus=1,
        )
        for trainer, rollout in ((1, 1), (2, 2))
        for install in ("in_place", "staged")
    ]
    if num_gpus > 1:
        skipped.append(f"colocated between GPUs: all ranks of those cases are on the first of {num_gpus}")
    return chosen, skipped


def main() -> int:
    """Runs the cases. Returns: 1 if a case was not exact or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds per case, after one that is not")
    parser.add_argument("--layers", type=int, default=24, help="layers of the random model (24: 0.6 B parameters)")
    parser.add_argument("--hidden", type=int, default=1024, help="its width")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("gpu-check: skipped everything: torch is not installed")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: skipped everything: torch finds no CUDA device here")
        print("  not run: collective over NCCL, colocated over CUDA IPC, device copies")
        return 0
    nccl = tuple(torch.cuda.nccl.version())
    multi_rank = nccl >= MULTI_RANK_NCCL and os.environ.get(MULTI_RANK) == "1"
    chosen, skipped = cases(torch.cuda.device_count(), nccl, multi_rank=multi_rank)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "num_gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl)),
        "copy_gb_per_s": copy_speeds(torch.cuda.device_count()),
        "cases": [],
        "skipped": skipped,
    }
    with redis_url() as url:
        for case in chosen:
            result = run_case(case, url, layers=options.layers, hidden=options.hidden, rounds=options.rounds)
            report["cases"].append(with_copy_share(result, report["copy_gb_per_s"]))
            print(f"gpu-check: {case.name}: {result.get('error') or summary(report['cases'][-1])}", flush=True)
    for line in skipped:
        print(f"gpu-check: skipped {line}")
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{report['device'].replace(' ', '-').lower()}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"gpu-check: written to {path}")
    return 0 if all(result["exact"] for result in report["cases"]) else 1


def with_copy_share(result: dict[str, Any], copy_gb_per_s: dict[str, float]) -> dict[str, Any]:
    """The result with its speed over that of the device's own copy, between GPUs if it used several."""
    if "gb_per_s" not in result:
        return result
    copy = copy_gb_per_s["between_devices" if result["gpus"] > 1 else "same_device"]
    return {**result, "share_of_copy": result["gb_per_s"] / copy}


def summary(result: dict[str, Any]) -> str:
    """One line of a case's result."""
    exact = "exact" if result["exact"] else f"NOT EXACT: {result['wrong'][:3]}"
    speed = f"{result['gb_per_s']:.1f} GB/s, {result['share_of_copy']:.2f} of the device's copy"
    return f"{exact}, {speed}, round {result['seconds']['total'] * 1000:.1f} ms"


def copy_speeds(num_gpus: int) -> dict[str, float]:
    """GB/s of a 1 GiB copy on a device, and between two."""
    import torch

    def speed(source: torch.Tensor, target: torch.Tensor) -> float:
        seconds = []
        for _ in range(6):
            torch.cuda.synchronize(source.device)
            start = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(source.device)
            torch.cuda.synchronize(target.device)
            seconds.append(time.perf_counter() - start)
        return float(source.numel() / statistics.median(seconds[1:]) / 1e9)

    here = torch.zeros(2**30, dtype=torch.uint8, device="cuda:0")
    speeds = {"same_device": speed(here, torch.empty_like(here))}
    if num_gpus > 1:
        speeds["between_devices"] = speed(here, torch.empty_like(here, device="cuda:1"))
    return speeds


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
            end.send(("ok", act(phase, version)))
    except EOFError:
        return
    except Exception as error:
        end.send(("error", f"{type(error).__name__}: {error}"))


def make_rank(case: Case, slot: str, device: Any, url: str, spec: Any) -> Callable[[str, int], Any]:
    """Builds a rank's tensors and its member.

    Returns: what does a phase, changes the weights (or what is expected of them), checks, or tells the shard's bytes.
    """
    import torch

    from tandem_api.weights.v1 import weights_pb2 as pb
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
        if phase == "CHECK":
            return [f"{slot} {name}" for name, t in expected.items() if not torch.equal(tensors[name], t)]
        round_ = pb.Round(
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
        if device.type == "cuda":
            torch.cuda.synchronize()
        return None

    return act


def random_spec(layers: int, hidden: int) -> Any:
    """A dense model; of 0.6 B parameters with 24 layers of 1,024."""
    from weightsync.model_spec import ModelSpec

    return ModelSpec.from_config(
        {
            "model_type": "qwen3",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": hidden // 8,
            "vocab_size": 98 * hidden,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
    )


def numbered(layout: Any, rank: int) -> dict[str, Any]:
    """A rank's parameters (bfloat16, CPU), every element a function of its place in the whole model.

    Places are mixed as integers: beyond 2^24, neighbours are one float32.
    """
    import torch

    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in layout.parameters_of(rank).items()}
    for shard in layout.shards[layout.shards["rank"] == rank]:
        name = layout.tensors[shard["tensor"]]
        cols = int(layout.tensor_shapes[shard["tensor"]][1])
        row, height, col, width, at_row, at_col = (
            int(shard[field]) for field in ("row", "rows", "col", "cols", "param_row", "param_col")
        )
        places = torch.arange(row, row + height)[:, None] * cols + torch.arange(col, col + width)[None, :]
        part = tensors[layout.params[shard["param"]]]
        matrix = part.view(-1, 1) if part.dim() == 1 else part.view(-1, part.shape[-1])
        values = ((places * 40_503 + zlib.crc32(name.encode())) % 65_521) / 65_521 - 0.5
        matrix[at_row : at_row + height, at_col : at_col + width] = values.to(torch.bfloat16)
    return tensors


if __name__ == "__main__":
    sys.exit(main())
