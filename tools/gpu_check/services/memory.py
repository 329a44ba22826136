"""Peak memory per rank: of the host as the kernel keeps it, of a GPU as nvidia-smi samples it."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from launcher.check.memory_budget import rollout_memory, trainer_memory
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.services.fleet import ServiceFleet
from tools.gpu_check.services.settings import Scale, Shape
from weightsync.model.spec import ModelSpec

MIB = 2**20
SAMPLE_MS = 200
# CUDA, NCCL, kernels' workspaces, CUDA graphs: what launcher/check/memory_budget.py does not count.
UNCOUNTED_MIB = 4096.0


@contextlib.contextmanager
def gpu_samples(path: Path) -> Iterator[None]:
    """nvidia-smi writes each GPU's used MiB into a file five times a second; nothing where it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        path.touch()
        yield
        return
    query = ["--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits", f"--loop-ms={SAMPLE_MS}"]
    with path.open("wb") as out:
        sampler = subprocess.Popen([program, *query], stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            sampler.terminate()
            sampler.wait(timeout=10)


def gpu_growth(lines: Sequence[str]) -> dict[str, float]:
    """Most MiB of each GPU, by index and by UUID (CUDA_VISIBLE_DEVICES takes both), beyond what it began with.

    >>> gpu_growth(["0, GPU-a, 10", "1, GPU-b, 20", "0, GPU-a, 500", "0, GPU-a, 300", "1, GPU-b, 21"])
    {'0': 490.0, 'GPU-a': 490.0, '1': 1.0, 'GPU-b': 1.0}
    """
    samples: dict[str, list[float]] = {}
    for line in lines:
        *names, used = (part.strip() for part in line.split(","))
        with contextlib.suppress(ValueError):  # the last one may be cut
            number = float(used)
            for name in names:
                samples.setdefault(name, []).append(number)
    return {name: max(found) - found[0] for name, found in samples.items()}


def host_peaks(fleet: ServiceFleet) -> dict[str, list[float]]:
    """Most resident MiB of each process of each service that was not killed, largest first."""
    ended = fleet.ended()
    names = [name for name in (*fleet.trainer_ranks, *fleet.replicas) if name not in ended]
    return {name: sorted(map(_peak_mib, fleet.supervisor.pids(name)), reverse=True) for name in names}


def _peak_mib(pid: int) -> float:
    with contextlib.suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def budgets(fleet: ServiceFleet) -> tuple[float, float]:
    """MiB of a trainer rank and of a rollout rank, as `tandem check` counts them."""
    spec = ModelSpec.from_folder(fleet.model)
    trainer = max(use.peak for use in trainer_memory(fleet.config, spec))
    rollout = rollout_memory(fleet.config.model_copy(update={"sync": _staged(fleet)}), spec)
    return trainer / MIB, (rollout.weights + (rollout.wanted_tokens or 0) * rollout.token + rollout.spare) / MIB


def _staged(fleet: ServiceFleet) -> object:
    return fleet.config.sync.model_copy(update={"install": "staged"})


def check_memory(fleet: ServiceFleet, findings: Findings, samples: Path) -> None:
    """Host memory of every process, and of GPUs beside the budget."""
    host = host_peaks(fleet)
    wrong = [f"nothing is known of {name}" for name, peaks in host.items() if not peaks or max(peaks) <= 0]
    figures: dict[str, object] = {"host_mib": {name: peaks[:4] for name, peaks in host.items()}}
    # page-locked memory beside GPUs, of which the kernel may count none to the process
    spec = ModelSpec.from_folder(fleet.model)
    figures["budget_host_mib"] = max(use.host for use in trainer_memory(fleet.config, spec)) / MIB
    if fleet.scale.device == "cuda":
        growth = gpu_growth(samples.read_text(encoding="utf-8").splitlines())
        trainer, rollout = budgets(fleet)
        ranks = gpu_ranks(fleet)
        budget = {gpu: sum(trainer if rank.startswith("trainer") else rollout for rank in ranks[gpu]) for gpu in ranks}
        wrong += over_budget(growth, budget, {gpu: len(found) for gpu, found in ranks.items()})
        figures |= {"gpu_mib": {gpu: growth.get(gpu) for gpu in ranks}, "budget_mib": budget, "ranks": ranks}
    findings.add("peak memory per rank", wrong, **figures)


class Placed(Protocol):
    """What tells on which GPUs a fleet's ranks are."""

    shape: Shape
    scale: Scale
    replicas: tuple[str, ...]


def gpu_ranks(fleet: Placed) -> dict[str, list[str]]:
    """Which ranks are on each GPU."""
    plan = fleet.shape.devices(fleet.scale)
    found: dict[str, list[str]] = {}
    for side, visible in (
        ("trainer", plan.trainer),
        *zip(fleet.replicas, plan.rollouts[: len(fleet.replicas)], strict=True),
    ):
        for rank, gpu in enumerate(visible.split(",")):
            found.setdefault(gpu, []).append(f"{side}/{rank}")
    return found


def over_budget(growth: Mapping[str, float], budget: Mapping[str, float], ranks: Mapping[str, int]) -> list[str]:
    """GPUs that took more MiB than their ranks' budget and what that does not count, and those that took none."""
    wrong = []
    for gpu, counted in budget.items():
        most = counted + UNCOUNTED_MIB * ranks[gpu]
        used = growth.get(gpu, 0.0)
        if used <= 0:
            wrong.append(f"GPU {gpu} was not used, as far as nvidia-smi tells")
        elif used > most:
            wrong.append(f"GPU {gpu} took {used:.0f} MiB, its ranks' budget is {counted:.0f} and {most - counted:.0f}")
    return wrong
