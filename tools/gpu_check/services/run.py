"""Which fleets run on so many GPUs, and what each of them is asked."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from servicekit.errors import TandemError
from tools.gpu_check.cases import MULTI_RANK
from tools.gpu_check.services.deaths import check_deaths
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.services.fleet import ServiceFleet, running
from tools.gpu_check.services.memory import check_memory, gpu_samples
from tools.gpu_check.services.resume import check_resume
from tools.gpu_check.services.rounds import check_dense, check_round
from tools.gpu_check.services.settings import Scale, Shape
from tools.gpu_check.services.trainers import TRAINERS, check_trainer

Ask = Callable[[ServiceFleet, Findings], Awaitable[None]]


async def ask_dense(fleet: ServiceFleet, findings: Findings) -> None:
    """Run rounds of every kind, a resume, and a round after it."""
    samples = await check_dense(fleet, findings)
    await check_resume(fleet, findings, samples)
    await check_round(fleet, findings, "round after the trainer's restart")


async def ask_mixture(fleet: ServiceFleet, findings: Findings) -> None:
    """A round of each install mode."""
    await check_round(fleet, findings, "mixture of experts: in_place round", install="in_place")
    await check_round(fleet, findings, "mixture of experts: staged round", install="staged")


FAILURES = (TimeoutError, TandemError, RuntimeError, ValueError, OSError, grpc.RpcError)
# Logs of the last run's services.
LOGS = Path(__file__).resolve().parents[3] / ".cache" / "gpu-check"

# By what is asked: the sizes that it should have, and those that do where GPUs are few.
WANTED: dict[str, tuple[Ask, tuple[Shape, ...]]] = {
    "dense": (ask_dense, (Shape(name="TP2 -> TP2"), Shape(name="TP1 -> TP1", tensor=1, rollout_tensor=1))),
    "deaths": (
        check_deaths,
        (
            Shape(name="TP2 -> 2 x TP1", rollout_tensor=1, replicas=2),
            Shape(name="TP1 -> 2 x TP1", tensor=1, rollout_tensor=1, replicas=2),
        ),
    ),
    "mixture": (
        ask_mixture,
        (
            Shape(name="TP2 EP2 -> TP2 EP2", experts=8),
            Shape(name="TP1 -> TP1", tensor=1, rollout_tensor=1, experts=8),
        ),
    ),
    **{what: (check_trainer, shapes) for what, shapes in TRAINERS.items()},
}


def choose(gpus: Sequence[str], *, multi_rank: bool) -> tuple[dict[str, Shape], list[str]]:
    """The fleet for each question on these GPUs, and what cannot run, with why. multi_rank: NCCL shares a GPU."""
    chosen, skipped = {}, []
    for what, (_, shapes) in WANTED.items():
        fitting = [shape for shape in shapes if shape.num_ranks <= len(gpus)]
        # SGLang and Megatron take a GPU per rank of theirs; several services on one are possible
        shared = [shape for shape in shapes if multi_rank and gpus and shape.tensor == shape.rollout_tensor == 1]
        taken = next(iter([*fitting, *shared]), None)
        for shape in shapes[: len(shapes) if taken is None else shapes.index(taken)]:
            instead = "" if taken is None else f"; {taken.name} runs instead"
            skipped.append(
                f"services, {what}, {shape.name}: {len(gpus)} GPUs for {shape.num_ranks} ranks, and ranks of two "
                f"services share one only with NCCL >= 2.31 and {MULTI_RANK}=1, with TP 1{instead}"
            )
        if taken is not None:
            chosen[what] = replace(taken, gpus=tuple(gpus))
    return chosen, skipped


async def run_fleets(chosen: dict[str, Shape], scale: Scale, findings: Findings) -> None:
    """One fleet after the other. A failure is a check that did not pass; the next fleet starts all the same."""
    for what, shape in chosen.items():
        start_s = time.monotonic()
        name = f"services, {what}, {shape.name}"
        print(f"gpu-check: {name} ...", flush=True)
        try:
            await run_fleet(what, shape, scale, findings)
        except FAILURES as error:
            findings.add(f"{name}: to its end", [f"{type(error).__name__}: {error}", f"logs: {LOGS / what}"])
        else:
            findings.add(f"{name}: to its end", [], seconds=round(time.monotonic() - start_s, 1))


async def run_fleet(what: str, shape: Shape, scale: Scale, findings: Findings) -> None:
    """One fleet from start to end, and its memory; logs go to LOGS. Raises: what its services and calls raise."""
    with TemporaryDirectory(prefix="gpu-samples-") as folder:
        samples = Path(folder) / "gpus"
        with gpu_samples(samples):
            async with running(shape, scale, LOGS / what) as fleet:
                try:
                    await WANTED[what][0](fleet, findings)
                except FAILURES as error:
                    ended = "; ".join(fleet.ended().values())
                    raise RuntimeError(f"{error}; ended: {ended or 'no service'}") from error
                check_memory(fleet, findings, samples)
