"""Checks a configuration against the memory of the GPUs: a line per side, and what to change where it does not fit."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from launcher.check.memory_budget import RolloutMemory, TrainerMemory, fitting_tokens, rollout_memory, trainer_memory
from launcher.run.devices import plan_devices, visible_gpus
from servicekit.errors import ConfigError
from tandem_config.loading import Draft
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from weightsync.model.spec import ModelSpec

GIB = 2**30
# Share of a GPU's memory; above it, what is not counted (CUDA, NCCL, fragments) may not fit.
NEAR = 0.9
_ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Lines to print, and the problems: errors above a GPU's memory, warnings near it."""

    lines: tuple[str, ...] = ()
    problems: tuple[ConfigProblem, ...] = ()


def memory_report(draft: Draft, gib: float | None) -> MemoryReport:
    """Work out the memory of each side; empty if the configuration or its model is invalid.

    Args:
        gib: memory of each GPU; None: as nvidia-smi reports it, and an empty report if the run would not use GPUs.
    """
    if draft.config is None or draft.bad_keys:
        return MemoryReport()
    gib = gpu_memory_gib(draft.config) if gib is None else gib
    if gib is None:
        return MemoryReport()
    try:
        spec = ModelSpec.from_folder(draft.config.model.path)
        report = check_memory(draft.config, spec, gib)
    except ConfigError:
        return MemoryReport()  # check_model reports it
    return replace(report, problems=tuple(draft.placed(report.problems)))


def gpu_memory_gib(config: RunConfig) -> float | None:
    """Ask nvidia-smi for the memory of the smallest visible GPU, in GiB; None if the run uses no GPU or it fails."""
    gpus = visible_gpus()
    plan = plan_devices(config, gpus)
    return None if plan.available < plan.needed else smallest_gpu_gib()


def smallest_gpu_gib() -> float | None:
    """Ask nvidia-smi for the memory of the smallest GPU, in GiB; None if it does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S, check=True).stdout
        return min(float(line) for line in answer.split("\n") if line.strip()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def check_memory(config: RunConfig, spec: ModelSpec, gib: float) -> MemoryReport:
    """Compare a trainer rank (of the stage that needs most) and a rollout rank with GPUs of `gib` GiB.

    Raises: ConfigError: the parallel sizes do not fit the model.
    """
    trainer = max(trainer_memory(config, spec), key=lambda stage: stage.peak)
    rollout = rollout_memory(config, spec)
    problems = [*_trainer_problems(config, spec, trainer, gib), *_rollout_problems(config, rollout, gib)]
    lines = (_trainer_line(config, trainer, gib), _rollout_line(config, rollout, gib))
    return MemoryReport(lines=lines, problems=tuple(problems))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _trainer_line(config: RunConfig, trainer: TrainerMemory, gib: float) -> str:
    stage = f", stage {trainer.stage}" if config.trainer.pipeline_parallel > 1 else ""
    tokens = config.trainer.max_tokens_per_micro_batch
    return (
        f"trainer rank{stage}: {_gib(trainer.peak)} of {gib:g} {trainer.moment} ({_gib(trainer.resident)} parameters, "
        f"gradients and AdamW; with {tokens} tokens in a micro-batch {_gib(trainer.activations)} activations and "
        f"{_gib(trainer.head_backward)} at the output layer){_idle(config, trainer)}"
    )


def _idle(config: RunConfig, trainer: TrainerMemory) -> str:
    """Say what is left between uses, and what it takes of the host; "" where nothing is offloaded."""
    if trainer.idle == trainer.resident:
        return ""
    ranks = f" for each of {config.trainer.world_size} ranks" if config.trainer.world_size > 1 else ""
    return f"; between uses {_gib(trainer.idle)}, and {_gib(trainer.host)} of page-locked host memory{ranks}"


def _rollout_line(config: RunConfig, rollout: RolloutMemory, gib: float) -> str:
    static = _static(config, gib)
    tokens = rollout.cache_tokens(static)
    sync = rollout.spare + rollout.buffers
    return (
        f"rollout rank: {_gib(rollout.peak(static))} of {gib:g} ({_gib(rollout.weights)} weights, "
        f"{_gib(tokens * rollout.token)} KV cache of {tokens} tokens, {_gib(rollout.graphs)} CUDA graphs, "
        f"{_gib(sync)} for a weight sync)"
    )


def _static(config: RunConfig, gib: float) -> int:
    return int(config.rollout.mem_fraction_static * gib * GIB)


def _trainer_problems(
    config: RunConfig, spec: ModelSpec, trainer: TrainerMemory, gib: float
) -> Iterator[ConfigProblem]:
    memory = gib * GIB
    if trainer.peak <= NEAR * memory:
        return
    over = trainer.peak > memory
    split = "raise trainer.tensor_parallel or trainer.pipeline_parallel"
    least = trainer.resident + trainer.optimizer
    if least > memory:
        yield ConfigProblem(
            key="trainer.tensor_parallel",
            value=str(config.trainer.tensor_parallel),
            message=f"a trainer rank needs {_gib(least)} of a GPU's {gib:g} for parameters, gradients and AdamW alone",
            suggestion=split,
        )
        return
    longest = config.data.max_prompt_tokens + config.grpo.max_new_tokens
    tokens = fitting_tokens(config, spec, NEAR * memory)
    fits = f"set trainer.max_tokens_per_micro_batch: {tokens}, or " if tokens >= longest else ""
    if _with_recompute(config, spec) <= NEAR * memory:
        fits += "trainer.recompute: full, or "
    yield ConfigProblem(
        key="trainer.max_tokens_per_micro_batch",
        value=str(config.trainer.max_tokens_per_micro_batch),
        message=f"a trainer rank needs {_gib(trainer.peak)} of a GPU's {gib:g} {trainer.moment}{_overhead_note(over)}",
        suggestion=f"{fits}{split}",
        severity=_severity(over),
    )


def _with_recompute(config: RunConfig, spec: ModelSpec) -> float:
    """Return the peak with trainer.recompute: full; infinite if that is set."""
    if config.trainer.recompute == "full":
        return float("inf")
    trainer = config.trainer.model_copy(update={"recompute": "full", "recompute_layers": None})
    return max(stage.peak for stage in trainer_memory(config.model_copy(update={"trainer": trainer}), spec))


def _rollout_problems(config: RunConfig, rollout: RolloutMemory, gib: float) -> Iterator[ConfigProblem]:
    static, memory = _static(config, gib), gib * GIB
    tokens = rollout.cache_tokens(static)
    if tokens == 0:
        yield ConfigProblem(
            key="rollout.tensor_parallel",
            value=str(config.rollout.tensor_parallel),
            message=f"a rollout rank's weights need {_gib(rollout.weights)}, rollout.mem_fraction_static leaves "
            f"{_gib(static)} of a GPU's {gib:g}",
            suggestion="raise rollout.tensor_parallel, or rollout.mem_fraction_static",
        )
        return
    if tokens < rollout.wanted_tokens:
        yield ConfigProblem(
            key="rollout.max_total_tokens",
            value=str(rollout.wanted_tokens),
            message=f"the KV cache has room for {tokens} tokens: rollout.mem_fraction_static leaves {_gib(static)} "
            f"of a GPU's {gib:g}, the weights take {_gib(rollout.weights)}",
            suggestion="lower it, or raise rollout.tensor_parallel or rollout.mem_fraction_static",
            severity="warning",
        )
    peak = rollout.peak(static)
    if peak > NEAR * memory:
        over = peak > memory
        yield ConfigProblem(
            key="rollout.mem_fraction_static",
            value=str(config.rollout.mem_fraction_static),
            message=f"a rollout rank needs {_gib(peak)} of a GPU's {gib:g} in a weight sync{_overhead_note(over)}",
            suggestion="lower rollout.mem_fraction_static, rollout.max_total_tokens or sync.bucket_mib"
            + (", or set sync.install: in_place" if rollout.spare else ""),
            severity=_severity(over),
        )


def _overhead_note(over: bool) -> str:
    return "" if over else "; CUDA, NCCL and fragments take 1 to 3 GiB besides"


def _severity(over: bool) -> Literal["error", "warning"]:
    return "error" if over else "warning"
