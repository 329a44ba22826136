"""Suggests how trainer and replicas share this machine: sizes that divide the model and fit the memory; a schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from launcher.check.memory import GIB, NEAR, fitting_tokens, host_gib, smallest_gpu_gib
from launcher.check.memory_budget import rollout_memory, trainer_memory
from launcher.check.model.trainer import check_tensor_size, check_trainer_sizes
from launcher.check.schedule import BATCH_PER_SLOT, LONG_TOKENS
from launcher.init.choices import Choices
from servicekit.cuda import find_gpus
from tandem_config.schema import RunConfig
from tandem_config.sections.grpo import PRESETS
from weightsync.model.spec import ModelSpec

_SIZES = (1, 2, 4, 8, 16)
# Without GPUs: of the machine's memory, for the trainer; the rest is for the replica and the system.
_HOST_SHARE = 0.5
# A replica should hold as many completions, or all of an iteration.
_COMPLETIONS = 64
# Fewest slots of a replica that are suggested: with fewer an engine's steps cost the same.
_FEWEST_SLOTS = 32
# Bytes of each parameter, in any type: looked at first, because the layout of a large mixture of experts takes seconds.
_LEAST_BYTES_TRAINER, _LEAST_BYTES_ROLLOUT = 16, 2


@dataclass(frozen=True, kw_only=True)
class HostMachine:
    """What a run can use.

    Attributes:
        gpu_gib: memory of the smallest GPU; None: none, or unknown.
        host_gib: memory of the host, or the limit of this container.
    """

    gpus: int
    gpu_gib: float | None
    host_gib: float

    @property
    def has_gpus(self) -> bool:
        """Whether a run can use GPUs: a trainer rank and a rollout rank need one each."""
        return self.gpus >= 2


def this_machine() -> HostMachine:
    """Look at this machine."""
    gpus = len(find_gpus().usable)
    return HostMachine(
        gpus=gpus,
        gpu_gib=smallest_gpu_gib() if gpus else None,
        host_gib=host_gib(),
    )


def suggest_layout(choices: Choices, spec: ModelSpec, machine: HostMachine) -> None:
    """Suggest parallel sizes, replicas, tokens of a micro-batch, and the KV cache; lengths must be in `choices`."""
    config = choices.config
    longest = config.data.max_prompt_tokens + config.grpo.max_new_tokens
    if not machine.has_gpus:
        what = "no GPU that can be used" if machine.gpus == 0 else "one GPU, and trainer and replica need one each"
        choices.suggest("trainer.tensor_parallel", 1, f"{what}: the run is on the CPU, with one trainer rank")
        choices.suggest("rollout.replicas", 1, "one replica beside it")
        _suggest_tokens(choices, spec, _HOST_SHARE * machine.host_gib * GIB, "half of this machine's memory")
        return
    memory = None if machine.gpu_gib is None else machine.gpu_gib * GIB
    of_gpu = f"{machine.gpus} GPUs" + (" of unknown memory" if memory is None else f" of {machine.gpu_gib:.0f} GiB")
    width = next(_rollout_sizes(choices, spec, memory, machine.gpus - 1), None)
    room = machine.gpus - (width or 1)
    sizes = next(_trainer_sizes(choices, spec, memory, room), None)
    if width is None or sizes is None:
        side = "a replica" if width is None else "the trainer"
        choices.remark("trainer.tensor_parallel", f"{of_gpu}: no sizes were found with which {side} fits them")
        choices.reasons.setdefault("rollout.replicas", "the smallest run")
        return
    tensor, pipeline = sizes
    ranks = tensor * pipeline
    copies = min(machine.gpus // 2, room) // ranks
    fits = "the smallest sizes that divide the model" + ("" if memory is None else " and fit the memory")
    choices.suggest("trainer.tensor_parallel", tensor, f"{of_gpu}: {fits}")
    choices.suggest("trainer.pipeline_parallel", pipeline, "more ranks than one tensor-parallel group are needed")
    choices.suggest(
        "trainer.data_parallel", max(1, copies), f"copies of the model, {ranks} GPUs each, on half of the GPUs"
    )
    for name, value in _of_experts(choices, spec, tensor).items():
        choices.suggest(f"trainer.{name}", value, "a mixture of experts over tensor-parallel ranks")
    choices.suggest("rollout.tensor_parallel", width, "the smallest size with which a replica fits its GPUs")
    rest = machine.gpus - choices.config.trainer.world_size
    choices.suggest("rollout.replicas", max(1, rest // width), f"on the other {rest} GPUs, {width} each")
    if memory is not None:
        _suggest_tokens(choices, spec, NEAR * memory, f"{NEAR:.0%} of a GPU's memory")
        _suggest_cache(choices, spec, memory, longest)


def suggest_schedule(choices: Choices, spec: ModelSpec, machine: HostMachine) -> None:
    """Suggest what waits for what, and what that needs; lengths and layout must be in `choices`."""
    tokens, kind = choices.config.grpo.max_new_tokens, "sync"
    needed = ("schedule.", "sync.", *(f"grpo.{name}" for name in ("preset", *PRESETS["decoupled"])))
    own = next((key for key in sorted(choices.given) if key.startswith(needed)), None)
    if not machine.has_gpus:
        why = "trainer and replica share this machine, so they take turns"
    elif tokens < LONG_TOKENS:
        why = f"completions of at most {tokens} tokens let no side wait for long; from {LONG_TOKENS} on: async"
    elif own is not None:
        why = (
            f"up to {tokens} tokens are a long tail, for which async is there (docs/scheduling.md); but {own} is given"
        )
    else:
        why = (
            f"replicas have GPUs of their own, and up to {tokens} tokens are a long tail: no side waits for the slowest"
        )
        kind, why = "async", f"{why}; samples are up to 3 versions old. sync is exact, and slower"
    choices.suggest("schedule.kind", kind, why)
    if choices.config.schedule.kind == "async":
        _suggest_for_async(choices, spec, machine)


def _suggest_for_async(choices: Choices, spec: ModelSpec, machine: HostMachine) -> None:
    config = choices.config
    choices.suggest("grpo.preset", "decoupled", "importance weights correct for the older policies of async")
    per_replica = config.grpo.prompts_per_iteration * config.grpo.group_size // config.rollout.replicas
    slots = min(config.rollout.max_running_requests, max(_FEWEST_SLOTS, per_replica // BATCH_PER_SLOT))
    why = f"an iteration has {BATCH_PER_SLOT} x as many for each replica: async keeps both sides busy"
    choices.suggest("rollout.max_running_requests", slots, why)
    staged = choices.config.changed("sync", install="staged")
    memory = None if machine.gpu_gib is None else machine.gpu_gib * GIB
    is_full = memory is not None and (
        rollout_memory(staged, spec).peak(int(config.rollout.mem_fraction_static * memory)) > NEAR * memory
    )
    over_nccl = config.rollout.tensor_parallel > 1
    if over_nccl or is_full:
        why = "engines of several ranks get weights over NCCL" if over_nccl else "a second copy does not fit"
        choices.suggest("sync.install", "in_place", f"{why}: generation pauses for a weight sync")


def _suggest_cache(choices: Choices, spec: ModelSpec, memory: float, longest: int) -> None:
    config = choices.config
    if rollout_memory(config, spec).peak(int(config.rollout.mem_fraction_static * memory)) <= NEAR * memory:
        return  # with all that the engine takes by itself
    samples = -(-config.grpo.prompts_per_iteration * config.grpo.group_size // config.rollout.replicas)
    held = _cache_tokens(config, spec, memory, wanted=samples * longest) // 1024 * 1024
    why = f"a replica holds {held // longest} samples of the greatest length; an iteration has {samples} for it"
    choices.suggest("rollout.max_total_tokens", max(held, longest), why)


def _rollout_sizes(choices: Choices, spec: ModelSpec, memory: float | None, most: int) -> Iterator[int]:
    """Yield tensor-parallel sizes of a replica that divide the model and whose KV cache holds enough samples."""
    grpo = choices.config.grpo
    longest = choices.config.data.max_prompt_tokens + grpo.max_new_tokens
    wanted = longest * min(_COMPLETIONS, grpo.prompts_per_iteration * grpo.group_size)
    for size in _candidates(choices, "rollout.tensor_parallel", most):
        least = _LEAST_BYTES_ROLLOUT * spec.num_elements / size
        may_fit = memory is None or least < memory
        if may_fit and not list(check_tensor_size(spec, "rollout.tensor_parallel", size)):
            config = choices.config.changed("rollout", tensor_parallel=size)
            if memory is None or _cache_tokens(config, spec, memory, wanted=wanted) == wanted:
                yield size


def _cache_tokens(config: RunConfig, spec: ModelSpec, memory: float, *, wanted: int) -> int:
    """Return how many of the wanted tokens a replica's KV cache holds."""
    budget = rollout_memory(config.changed("rollout", max_total_tokens=wanted), spec)
    static = int(config.rollout.mem_fraction_static * memory)
    rest = int(NEAR * memory) - budget.graphs - budget.spare - budget.buffers
    return budget.cache_tokens(min(static, rest))


def _trainer_sizes(choices: Choices, spec: ModelSpec, memory: float | None, most: int) -> Iterator[tuple[int, int]]:
    """Yield (tensor, pipeline) sizes that divide the model and hold the longest sample, fewest ranks first."""
    tensors = _candidates(choices, "trainer.tensor_parallel", most)
    stages = _candidates(choices, "trainer.pipeline_parallel", most)
    pairs = [pair for pair in product(tensors, stages) if pair[0] * pair[1] <= most]
    for tensor, pipeline in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1])):
        config = choices.config.changed("trainer", tensor_parallel=tensor, pipeline_parallel=pipeline)
        config = config.changed("trainer", **_of_experts(choices, spec, tensor))
        divides = not list(check_trainer_sizes(spec, config.trainer, lambda *keys: True))
        if divides and (memory is None or _micro_batch(config, spec, NEAR * memory) > 0):
            yield tensor, pipeline


def _of_experts(choices: Choices, spec: ModelSpec, tensor: int) -> dict[str, Any]:
    """Return what a mixture of experts needs besides tensor parallelism: its experts spread over the same ranks."""
    if spec.num_experts == 0 or tensor == 1:
        return {}
    wanted = {"sequence_parallel": True, "expert_parallel": tensor}
    return {name: value for name, value in wanted.items() if f"trainer.{name}" not in choices.given}


def _micro_batch(config: RunConfig, spec: ModelSpec, memory: float) -> int:
    """Return the largest tokens of a micro-batch that fit, at most the configured ones; 0: not even one sample does."""
    longest = config.data.max_prompt_tokens + config.grpo.max_new_tokens
    shards = config.trainer.tensor_parallel * config.trainer.pipeline_parallel
    if _LEAST_BYTES_TRAINER * spec.num_elements / shards > memory:
        return 0
    tokens = max(longest, config.trainer.max_tokens_per_micro_batch)
    config = config.changed("trainer", max_tokens_per_micro_batch=tokens)
    if max(stage.peak for stage in trainer_memory(config, spec)) > memory:
        tokens = fitting_tokens(config, spec, memory)
    return tokens if tokens >= longest else 0


def _suggest_tokens(choices: Choices, spec: ModelSpec, memory: float, of_what: str) -> None:
    config = choices.config
    longest = config.data.max_prompt_tokens + config.grpo.max_new_tokens
    tokens = _micro_batch(config, spec, memory)
    why = f"as many as fit {of_what}" if tokens else f"one sample of the greatest length; it may not fit {of_what}"
    choices.suggest("trainer.max_tokens_per_micro_batch", tokens or longest, why)


def _candidates(choices: Choices, key: str, most: int) -> list[int]:
    """Return the size that the user gave, or those to try."""
    section, _, field = key.partition(".")
    if key in choices.given:
        return [int(getattr(getattr(choices.config, section), field))]
    return [size for size in _SIZES if size <= most]
