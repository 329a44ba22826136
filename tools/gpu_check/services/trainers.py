"""Trainers without replicas, many options at a time: they train, keep and read again what one rank without any does.

All take the same two steps on the same samples, with a reference policy in the loss. A checkpoint is written beside the
second one, which is then repeated from it. Page-locked memory, gathering, recomputing, profiles: what only ranks on
GPUs do for real.
"""

import importlib.util
import math
from functools import partial
from typing import Any

from tandem_files.profiles.folder import read_profiles
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.services.fleet import ServiceFleet
from tools.gpu_check.services.resume import Tensors, distance, load_folder, unequal
from tools.gpu_check.services.samples import Sample, prompts, train_step
from tools.gpu_check.services.settings import Shape

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
_PROMPTS, _TOKENS = 8, 24
PROFILE_S = 60.0
_KL = {"kl_coefficient": 0.05, "kl_in": "loss"}
# Sizes, and the options of section `trainer` beside them; the profile is of the first step.
_ZERO: dict[str, Any] = {
    "data": 2,
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "offload": {"parameters": True, "gradients": True, "optimizer": True},
    "recompute": "full",
    "profiled": True,
}
_CHUNKS: dict[str, Any] = {"context": 2, "share_prompts": True, "recompute": "selective"}
_TE: dict[str, Any] = {"layer_spec": "transformer_engine"}


def _alone(name: str, *, profiled: bool = False, **options: Any) -> Shape:
    """Make a trainer alone, with fields of Shape and options of section `trainer`."""
    sizes = {key: options.pop(key) for key in ("tensor", "data", "context", "experts") if key in options}
    # AdamW divides a first gradient by its own size: by more than that, so that rounding stays small
    sections = {"trainer": {"adam_eps": 1e-5, **options}, "grpo": _KL, "profile": {"steps": int(profiled), "first": 1}}
    return Shape(name=name, replicas=0, sections=sections, **{"tensor": 1, **sizes})


# By what is asked, as run.WANTED: the sizes that it should have, and those that do where GPUs are few.
TRAINERS: dict[str, tuple[Shape, ...]] = {
    "trainer": (_alone("one rank"),),
    "trainer, ZeRO-1": (
        _alone("TP2 DP2 ZeRO-1, overlaps, offload, recompute, profile", tensor=2, **_ZERO),
        _alone("DP2 ZeRO-1, overlaps, offload, recompute, profile", **_ZERO),
    ),
    "trainer, chunks": (
        _alone("CP2 DP2, shared prompts, recompute", data=2, **_CHUNKS),
        _alone("CP2, shared prompts, recompute", **_CHUNKS),
    ),
}
if HAS_TE:
    TRAINERS |= {
        "trainer, TransformerEngine": (_alone("TP2, TransformerEngine", tensor=2, **_TE),),
        "trainer, experts": (_alone("one rank, experts", experts=8),),
        "trainer, grouped": (_alone("one rank, grouped experts", experts=8, moe_grouped_gemm=True, **_TE),),
    }


async def check_trainer(fleet: ServiceFleet, findings: Findings) -> None:
    """Two steps, a checkpoint between them, the second step again from it; beside the first trainer of such a model."""
    name, saved = fleet.shape.name, fleet.run_dir / "between"
    samples = fixed_samples(fleet.scale.vocabulary)
    begin = await _weights(fleet)
    await train_step(fleet, "first", samples)
    await fleet.trainer.save_checkpoint(saved, background=True)
    version = await train_step(fleet, "second", samples)
    await fleet.trainer.finish_checkpoint(saved)
    end = await _weights(fleet)
    await fleet.trainer.restore(saved, version + 1)
    await train_step(fleet, "second-again", samples)
    update = distance(end, begin)
    again = distance(end, await _weights(fleet)) / update if update > 0 else math.inf
    wrong = unequal(again, fleet.scale.resume_limit)
    first: Tensors = findings.kept.setdefault(f"trainer of {fleet.shape.experts} experts", end)
    apart = distance(first, end) / update if update > 0 else math.inf
    if not apart <= fleet.scale.layout_limit:
        wrong.append(f"two steps differ by {apart:.3g} of the update from those of one rank without options")
    if fleet.config.profile.covers(1, 0):
        try:
            await fleet.until(partial(_has_profile, fleet), PROFILE_S, "the first step's profile")
        except RuntimeError as error:
            wrong.append(str(error))
    findings.add(f"{name}: two steps", wrong, again_over_update=again, apart_over_update=apart)


async def _has_profile(fleet: ServiceFleet) -> bool:
    return len(read_profiles(fleet.run_dir)) > 0  # a process beside the trainer makes it, the table last


async def _weights(fleet: ServiceFleet) -> Tensors:
    return load_folder(await fleet.export())


def fixed_samples(vocabulary: int) -> list[Sample]:
    """The same for every fleet: two completions of each prompt, by a policy that knows nothing."""
    asked, completions = prompts(vocabulary, _PROMPTS, seed=1), prompts(vocabulary, 4 * _PROMPTS, seed=2)
    return [
        Sample(
            prompt=tuple(asked[index // 2]),
            tokens=(*completions[2 * index], *completions[2 * index + 1]),
            logprobs=(-math.log(vocabulary),) * _TOKENS,
            spans=((0, 0, _TOKENS),),
        )
        for index in range(2 * _PROMPTS)
    ]
