"""Checks a configuration against the memory of GPUs and hosts: a line for each, and what to change if it is short."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from launcher.check.memory_budget import (
    DTYPE_BYTES,
    RolloutMemory,
    TrainerMemory,
    rollout_memory,
    trainer_memory,
)
from launcher.run.devices import plan_devices
from servicekit.cuda import find_gpus
from servicekit.errors import ConfigError
from tandem_config.loading import Draft
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

GIB = 2**30
# Share of a GPU's memory; above it, what is not counted (CUDA, NCCL, fragments) may not fit.
NEAR = 0.9
_ANSWER_TIMEOUT_S = 10.0
# Host memory of a rank's process besides what is counted: libraries, CUDA's context, NCCL, batches. A trainer of a tiny
# model took 3.1 GiB on an H200 (benchmarks/gpu).
_PROCESS = 4 * 2**30
_CGROUP = Path("/sys/fs/cgroup/memory.max")  # as a container sees its limit


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Lines to print, and the problems: errors above a GPU's memory, warnings near it."""

    lines: tuple[str, ...] = ()
    problems: tuple[ConfigProblem, ...] = ()


def memory_report(draft: Draft, gib: float | None, host: float | None = None) -> MemoryReport:
    """Work out the memory of each side; empty if the configuration or its model is invalid.

    Args:
        gib: memory of each GPU; None: as nvidia-smi reports it, and an empty report if the run would not use GPUs.
        host: memory of the machine that has GPUs of `gib`, in GiB; None: another's, which is not compared.
    """
    if draft.config is None or draft.bad_keys:
        return MemoryReport()
    config = draft.config
    if gib is None and config.fleet.kind != "kubernetes":
        host = host_gib()
    gib = gpu_memory_gib(config) if gib is None else gib
    if gib is None:
        return MemoryReport()
    try:
        spec = ModelSpec.from_folder(config.model.path)
        report = check_memory(config, spec, gib)
        hosts = host_problems(config, spec, config.trainer.world_size, host, "this machine") if host is not None else ()
        report = replace(report, problems=(*report.problems, *hosts))
    except ConfigError:
        return MemoryReport()  # check_model reports it
    return replace(report, problems=tuple(draft.placed(report.problems)))


def gpu_memory_gib(config: RunConfig) -> float | None:
    """Ask nvidia-smi for the memory of the smallest visible GPU, in GiB; None if the run uses no GPU or it fails."""
    return smallest_gpu_gib() if plan_devices(config, find_gpus().usable).on_gpus else None


def smallest_gpu_gib() -> float | None:
    """Ask nvidia-smi for the memory of the smallest GPU, in GiB; None if it does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S, check=True).stdout
        return min(float(line) for line in answer.split("\n") if line.strip()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def fitting_tokens(config: RunConfig, spec: ModelSpec, memory: float) -> int:
    """Halve trainer.max_tokens_per_micro_batch until the trainer's peak is at most `memory` bytes; 0 if none fits."""
    tokens = config.trainer.max_tokens_per_micro_batch // 2
    while tokens >= 1:
        found = trainer_memory(config.changed("trainer", max_tokens_per_micro_batch=tokens), spec)
        if max(stage.peak for stage in found) <= memory:
            return tokens
        tokens //= 2
    return 0


def host_gib() -> float:
    """Return the memory of this machine, or the limit of this container, in GiB."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP.read_text(encoding="ascii").strip() if _CGROUP.is_file() else "max"
    return min(host, int(limit) if limit.isdecimal() else host) / GIB


def host_memory(config: RunConfig, spec: ModelSpec, ranks_per_host: int) -> int:
    """Estimate the host memory of the trainer's fullest host, in bytes: its processes, what they keep, an export.

    A checkpoint takes its copy whether it is written during the training or not (run.checkpoint_async): kept, or while
    it is written. Of ranks with equal state the first writes.

    Raises: ConfigError: the parallel sizes do not fit the model.
    """
    parallel, stages = Parallel(**config.trainer.parallel_sizes), trainer_memory(config, spec)

    def rank_bytes(rank: int) -> int:
        stage, place = stages[rank // parallel.stage_size], rank % parallel.stage_size
        writes_experts, writes = place < parallel.expert * parallel.expert_tensor, place < parallel.tensor
        saved = stage.saved[0] * writes_experts + stage.saved[1] * writes
        # rank 0 gathers the whole model for an export
        return _PROCESS + stage.host + saved + (spec.num_elements * DTYPE_BYTES[config.model.dtype] if rank == 0 else 0)

    ranks = [rank_bytes(rank) for rank in range(parallel.world_size)]
    return max(sum(ranks[first : first + ranks_per_host]) for first in range(0, len(ranks), ranks_per_host))


def host_problems(
    config: RunConfig, spec: ModelSpec, ranks_per_host: int, gib: float, whose: str
) -> Iterator[ConfigProblem]:
    """Compare what the ranks of a trainer host take with the `gib` GiB of `whose` memory."""
    needed = host_memory(config, spec, ranks_per_host)
    if needed <= NEAR * gib * GIB:
        return
    split = config.trainer.data_parallel * config.trainer.context_parallel > 1
    zero = "trainer.distributed_optimizer: true, or " if split and not config.trainer.distributed_optimizer else ""
    several = [key for key in ("updates_per_iteration", "epochs") if getattr(config.grpo, key) > 1]
    undo = f"{' and '.join(f'grpo.{key}: 1' for key in several)}, or " if several else ""
    yield problem(
        "trainer",
        "",
        f"{ranks_per_host} ranks on a host take {_gib(needed)} of host memory, {whose} has {gib:g}: undoing "
        "steps, checkpoints, an export, offload, reference, processes",
        f"{zero}{undo}more memory",
        severity=_severity(needed > gib * GIB),
    )


def check_memory(config: RunConfig, spec: ModelSpec, gib: float) -> MemoryReport:
    """Compare a trainer rank (of the stage that needs most) and a rollout rank with GPUs of `gib` GiB.

    Raises: ConfigError: the parallel sizes do not fit the model.
    """
    trainer = max(trainer_memory(config, spec), key=lambda stage: stage.peak)
    rollout = rollout_memory(config, spec)
    problems = [*_trainer_problems(config, spec, trainer, gib), *_rollout_problems(config, rollout, gib)]
    lines = (
        _trainer_line(config, trainer, gib),
        _rollout_line(config, rollout, gib),
        _host_line(config, spec, trainer),
    )
    return MemoryReport(lines=lines, problems=tuple(problems))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _trainer_line(config: RunConfig, trainer: TrainerMemory, gib: float) -> str:
    stage = f", stage {trainer.stage}" if config.trainer.pipeline_parallel > 1 else ""
    tokens = config.trainer.max_tokens_per_micro_batch
    idle = "" if trainer.idle == trainer.resident else f"; between uses {_gib(trainer.idle)}"
    return (
        f"trainer rank{stage}: {_gib(trainer.peak)} of {gib:g} {trainer.moment} ({_gib(trainer.resident)} parameters, "
        f"gradients and AdamW; with {tokens} tokens in a micro-batch {_gib(trainer.activations)} activations and "
        f"{_gib(trainer.head_backward)} at the output layer){idle}"
    )


def _host_line(config: RunConfig, spec: ModelSpec, trainer: TrainerMemory) -> str:
    """Say what all ranks take where they share a host: of Kubernetes, `tandem deploy check` knows the pods."""
    ranks = min(config.trainer.world_size, 8)
    of_all = host_memory(config, spec, ranks)
    return (
        f"trainer host: {_gib(of_all)} of host memory for {ranks} ranks ({_gib(trainer.host)} of each page-locked, "
        f"{_gib(sum(trainer.saved))} for a checkpoint of each that writes)"
    )


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
        yield problem(
            "trainer.tensor_parallel",
            config.trainer.tensor_parallel,
            f"a trainer rank needs {_gib(least)} of a GPU's {gib:g} for parameters, gradients and AdamW alone",
            "".join(f"set {text}, or " for text in _savings(config, spec, NEAR * memory)) + split,
        )
        return
    longest = config.data.max_prompt_tokens + config.grpo.max_new_tokens
    tokens = fitting_tokens(config, spec, NEAR * memory)
    fits = f"set trainer.max_tokens_per_micro_batch: {tokens}, or " if tokens >= longest else ""
    fits += "".join(f"{text}, or " for text in _savings(config, spec, NEAR * memory))
    yield problem(
        "trainer.max_tokens_per_micro_batch",
        config.trainer.max_tokens_per_micro_batch,
        f"a trainer rank needs {_gib(trainer.peak)} of a GPU's {gib:g} {trainer.moment}{_overhead_note(over)}",
        f"{fits}{split}",
        severity=_severity(over),
    )


# Options that need less memory, by what to write.
_SAVINGS: dict[str, dict[str, Any]] = {
    "trainer.distributed_optimizer: true": {"distributed_optimizer": True},
    "trainer.recompute: full": {"recompute": "full", "recompute_layers": None},
}


def _savings(config: RunConfig, spec: ModelSpec, memory: float) -> Iterator[str]:
    """Find the options that are not set and of which one would make the trainer fit."""
    trainer = config.trainer
    for text, changes in _SAVINGS.items():
        divides = trainer.data_parallel * trainer.context_parallel > 1 or "distributed_optimizer" not in changes
        saving = config.changed("trainer", **changes)
        if divides and saving != config:
            found = trainer_memory(saving, spec)
            if max(stage.peak for stage in found) <= memory:
                yield text


def _rollout_problems(config: RunConfig, rollout: RolloutMemory, gib: float) -> Iterator[ConfigProblem]:
    static, memory = _static(config, gib), gib * GIB
    tokens = rollout.cache_tokens(static)
    if tokens == 0:
        yield problem(
            "rollout.tensor_parallel",
            config.rollout.tensor_parallel,
            f"a rollout rank's weights need {_gib(rollout.weights)}, rollout.mem_fraction_static leaves "
            f"{_gib(static)} of a GPU's {gib:g}",
            "raise rollout.tensor_parallel, or rollout.mem_fraction_static",
        )
        return
    longest = config.data.max_prompt_tokens + config.grpo.max_new_tokens
    needed = longest if rollout.wanted_tokens is None else rollout.wanted_tokens
    if tokens < needed:
        yield problem(
            "rollout.max_total_tokens",
            "null" if rollout.wanted_tokens is None else str(needed),
            f"the KV cache has room for {tokens} tokens of {needed}: rollout.mem_fraction_static leaves "
            f"{_gib(static)} of a GPU's {gib:g}, the weights take {_gib(rollout.weights)}",
            f"lower {'the lengths' if rollout.wanted_tokens is None else 'it'}, or raise "
            "rollout.tensor_parallel or rollout.mem_fraction_static",
            severity="warning",
        )
    peak = rollout.peak(static)
    if peak > NEAR * memory:
        over = peak > memory
        yield problem(
            "rollout.mem_fraction_static",
            config.rollout.mem_fraction_static,
            f"a rollout rank needs {_gib(peak)} of a GPU's {gib:g} in a weight sync{_overhead_note(over)}",
            "lower rollout.mem_fraction_static, rollout.max_total_tokens or sync.bucket_mib"
            + (", or set sync.install: in_place" if rollout.spare else ""),
            severity=_severity(over),
        )


def _overhead_note(over: bool) -> str:
    return "" if over else "; CUDA, NCCL and fragments take 1 to 3 GiB besides"


def _severity(over: bool) -> Literal["error", "warning"]:
    return "error" if over else "warning"
