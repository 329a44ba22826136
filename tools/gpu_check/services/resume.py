"""Two train steps after a checkpoint and --resume are the two steps of the processes that continued."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tandem_files.checkpoints import TRAINER_FOLDER, mark_complete, step_folder
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.services.fleet import ServiceFleet
from tools.gpu_check.services.samples import Sample, train_step
from weightsync.model.spec import ModelSpec

Tensors = Mapping[str, torch.Tensor]


async def check_resume(fleet: ServiceFleet, findings: Findings, samples: Sequence[Sample]) -> None:
    """Saves, trains two more steps, starts the trainer again with --resume, trains the same two steps."""
    version = (await fleet.trainer.status()).policy_version
    folder = step_folder(fleet.run_dir, 1)
    folder.mkdir(parents=True)
    await fleet.trainer.save_checkpoint(folder / TRAINER_FOLDER)
    mark_complete(
        folder,
        iteration=1,
        policy_version=version,
        model=str(fleet.model),
        model_fingerprint=ModelSpec.from_folder(fleet.model).fingerprint(),
    )
    saved = await _tensors(fleet)
    uninterrupted = await _two_steps(fleet, samples)
    await fleet.start_again(fleet.trainer_ranks, resume=True)
    found = (await fleet.trainer.status()).policy_version
    resumed = await _two_steps(fleet, samples)
    wrong = [] if found == version else [f"the trainer resumed at version {found}, saved was {version}"]
    update = distance(uninterrupted, saved)
    share = distance(uninterrupted, resumed) / update if update > 0 else math.inf
    findings.add(
        "resume: two train steps",
        wrong + unequal(share, fleet.scale.resume_limit),
        bitwise_equal=share == 0,
        difference_over_update=share,
        limit=fleet.scale.resume_limit,
    )


async def _two_steps(fleet: ServiceFleet, samples: Sequence[Sample]) -> Tensors:
    for step in range(2):
        await train_step(fleet, f"resume-{step}", samples)
    return await _tensors(fleet)


async def _tensors(fleet: ServiceFleet) -> Tensors:
    return load_folder(await fleet.export())


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def distance(first: Tensors, second: Tensors) -> float:
    """Euclidean, over all parameters; 0 only where every bit is equal; not finite where names differ."""
    if first.keys() != second.keys():
        return math.inf
    if all(torch.equal(_bits(first[name]), _bits(second[name])) for name in first):
        return 0.0
    squares = [float((first[name].double() - second[name].double()).square().sum()) for name in first]
    return max(math.sqrt(sum(squares)), math.ulp(0.0))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def unequal(share: float, limit: float) -> list[str]:
    """What is wrong with |difference after a resume| / |update|."""
    if share <= limit:
        return []
    return [f"two steps after a resume differ by {share:.3g} of the update from those without one, limit {limit:g}"]
